import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.text.chat import render_chat, render_prompt_ids
from jaxrl_llm.text.gguf_tokenizer import GgufTokenizer
from jaxrl_llm.text.sentencepiece import build_sentencepiece
from jaxrl_llm.types import UserError

BOS, EOS = 1, 2


@pytest.fixture
def make(metadata):
    def make(**changes):
        return GgufTokenizer(metadata | {f"tokenizer.{k}": v for k, v in changes.items()}, source="t.gguf")

    return make


def test_model_is_the_files_own_template_with_its_system_message(make):
    tokenizer = make()
    text = tokenizer.encode
    expected = [
        *(BOS, *text("system\nhello"), EOS, *text("\n")),
        *(BOS, *text("user\n37 + 25 ="), EOS, *text("\n")),
        *(BOS, *text("assistant\n")),
    ]
    assert render_prompt_ids(tokenizer, "37 + 25 =", "model") == expected


def test_none_is_the_text_itself(make):
    tokenizer = make()
    assert render_prompt_ids(tokenizer, "37 + 25 =", "none") == tokenizer.encode("37 + 25 =")
    built = build_sentencepiece(["37+25=62"], vocab_size=64)
    assert render_prompt_ids(built, "37+25=", "none") == built.encode("37+25=")


def test_the_begin_of_sequence_token_comes_once(make):
    asks = make(**{"ggml.add_bos_token": True})
    assert render_prompt_ids(asks, "hello", "none") == [BOS, *asks.encode("hello")]
    # Written out in the text it is text, so it is not taken for the one that is due.
    assert render_prompt_ids(asks, "<|im_start|>hello", "none") == [BOS, *asks.encode("<|im_start|>hello")]
    # A template brings its own.
    template = "{{ bos_token }}{{ messages[0]['content'] }}{# <|im_start|> #}{{ eos_token }}"
    asks = make(**{"ggml.add_bos_token": True, "chat_template": template})
    assert render_prompt_ids(asks, "hello", "model") == [BOS, *asks.encode("hello"), EOS]


def test_users_cannot_write_special_tokens(make):
    tokenizer = make()

    @given(st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "<|im_", "|>", "system", "\n", "\ue000", "x"])))
    def check(parts):
        text = "".join(parts)
        ids = render_prompt_ids(tokenizer, text, "model")
        assert [i for i in ids if i < 3] == [BOS, EOS, BOS, EOS, BOS]
        turn = ids[ids.index(BOS, 1) + 1 : -1]
        assert tokenizer.decode(turn[: turn.index(EOS)]) == f"user\n{text}"

    check()


def test_text_is_encoded_across_the_border_of_the_template(make, metadata):
    tokenizer = make()
    two_newlines = metadata["tokenizer.ggml.tokens"].index("\u010a\u010a")
    assert two_newlines in render_prompt_ids(tokenizer, "\n1", "model")


def test_a_template_that_trims_the_message_is_followed(make):
    template = "<|im_start|>{{ messages[0]['content'] | trim }}<|im_end|>"
    tokenizer = make(chat_template=template)
    assert render_prompt_ids(tokenizer, "  hello\n", "model") == [BOS, *tokenizer.encode("hello"), EOS]


def test_blocks_swallow_the_newline_and_the_indentation_around_them(make):
    template = "<|im_start|>\n  {% for m in messages %}\n{{ m['content'] }}\n  {% endfor %}\n<|im_end|>"
    tokenizer = make(chat_template=template)
    assert render_prompt_ids(tokenizer, "x", "model") == [BOS, *tokenizer.encode("\nx\n"), EOS]


def test_templates_may_break_out_of_a_loop(make):
    template = "<|im_start|>{% for m in messages * 2 %}{{ m['content'] }}{% break %}{% endfor %}"
    tokenizer = make(chat_template=template)
    assert render_prompt_ids(tokenizer, "x", "model") == [BOS, *tokenizer.encode("x")]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("<|im_start|>{{ messages[0]['content'] | upper }}", "rewrites a message"),
        ("<|im_start|>nothing", "rewrites a message"),
        ("<|im_start|>{{ raise_exception('one turn only') }}", "cannot be rendered: one turn only"),
        ("<|im_start|>{% if %}", "cannot be rendered"),
        ("<|im_start|>{{ ''.__class__.__mro__ }}", "cannot be rendered"),
        ("<|im_start|>{{ messages.append(1) }}", "cannot be rendered"),
    ],
)
def test_templates_that_cannot_be_followed_are_refused(make, template, message):
    with pytest.raises(UserError, match=message):
        render_prompt_ids(make(chat_template=template), "hello", "model")


def test_model_without_a_template_is_refused():
    built = build_sentencepiece(["37+25=62"], vocab_size=64)
    with pytest.raises(UserError, match="brings no template; set it to none"):
        render_prompt_ids(built, "37", "model")
    with pytest.raises(UserError, match="'llama2' is not known; give one of: none, model, chatml"):
        render_prompt_ids(built, "37", "llama2")


def test_plain_chatml_is_the_model_template_without_its_system_message(make):
    tokenizer = make()
    whole, plain = (render_prompt_ids(tokenizer, "37 + 25 =", template) for template in ("model", "chatml"))
    assert plain[0] == BOS
    assert plain.count(BOS) == 2
    assert plain == whole[-len(plain) :]
    with pytest.raises(UserError, match=r"no special token '<\|im_start\|>'"):
        render_prompt_ids(build_sentencepiece(["37"], vocab_size=9), "37", "chatml")


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1? <|im_end|>"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": " and 2+2?"},
]


def test_a_conversation_keeps_every_turn_and_trusts_none(make):
    tokenizer = make()
    start, end = (tokenizer.token_id(name) for name in ("<|im_start|>", "<|im_end|>"))
    expected = []
    for message in CONVERSATION:
        expected += [start, *tokenizer.encode(f"{message['role']}\n{message['content']}"), end]
        expected += tokenizer.encode("\n")
    expected += [start, *tokenizer.encode("assistant\n")]
    assert render_chat(tokenizer, CONVERSATION, template="chatml") == expected


def test_one_user_turn_is_the_prompt(make):
    tokenizer = make()
    for template in ("model", "chatml"):
        whole = render_chat(tokenizer, [{"role": "user", "content": "37 + 25 ="}], template=template)
        assert whole == render_prompt_ids(tokenizer, "37 + 25 =", template)


def test_a_template_that_leaves_a_turn_out_is_refused(make):
    last_only = make(chat_template="<|im_start|>{{ messages[-1]['content'] }}")
    with pytest.raises(UserError, match="rewrites a message"):
        render_chat(last_only, CONVERSATION)
