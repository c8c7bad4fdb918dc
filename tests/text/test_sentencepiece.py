import io
import re

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.text.sentencepiece import SentencePieceTokenizer, build_sentencepiece, load_sentencepiece
from jaxrl_llm.types import UserError

ADDITION = [f"{a}+{b}={a + b}" for a in range(10, 30) for b in range(10, 100)]
SPACED = ["37 + 25 = 62", "  two  spaces ", "tab\tnew\nline"]


def train(**options):
    """A model of the library's own, with what `build_sentencepiece` never makes."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(ADDITION),
        model_writer=model,
        model_type="char",
        vocab_size=64,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


def test_each_character_of_a_sum_is_one_id_and_only_two_ids_are_special():
    tokenizer = build_sentencepiece(ADDITION, vocab_size=64)
    ids = tokenizer.encode("37+25=")
    assert len(ids) == 6
    assert len(set(ids)) == 6
    assert tokenizer.vocab_size == 12 + 2  # ten digits, + and =
    assert dict(tokenizer.special_tokens) == {"<unk>": 0, "</s>": 1}
    assert tokenizer.eos_id == tokenizer.token_id("</s>") == 1
    assert tokenizer.bos_id is None
    assert not tokenizer.adds_bos


def test_bpe_joins_characters():
    tokenizer = build_sentencepiece(ADDITION, vocab_size=40, model_type="bpe")
    assert tokenizer.vocab_size == 40
    assert len(tokenizer.encode("12+12=24")) < 8


@pytest.mark.parametrize("model_type", ["char", "bpe"])
def test_text_comes_back_as_it_was(model_type):
    lines = ADDITION[:200] + SPACED
    tokenizer = build_sentencepiece(lines, vocab_size=100, model_type=model_type)
    chars = sorted(set("".join(lines)))

    @given(st.text(st.sampled_from(chars), max_size=30))
    def check(text):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not set(ids) & {0, 1}

    check()
    for text in ["", " ", "   ", " 1", "1 ", "\n\n", " \n "]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_same_lines_give_the_same_model():
    first = build_sentencepiece(ADDITION, vocab_size=40, model_type="bpe")
    again = build_sentencepiece(iter(ADDITION), vocab_size=40, model_type="bpe")
    other = build_sentencepiece(ADDITION, vocab_size=39, model_type="bpe")
    assert first.fingerprint == again.fingerprint != other.fingerprint


def test_saved_and_loaded_it_is_the_same(tmp_path):
    built = build_sentencepiece(SPACED, vocab_size=64)
    built.save(tmp_path / "t.model")
    loaded = load_sentencepiece(tmp_path / "t.model")
    assert loaded.fingerprint == built.fingerprint
    assert loaded.encode("37 + 25") == built.encode("37 + 25")


def test_building_and_failing_print_nothing(capfd):
    build_sentencepiece(ADDITION, vocab_size=40, model_type="bpe")
    with pytest.raises(UserError):
        SentencePieceTokenizer(b"no model")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("char", ["x", " ", "\u00e9", "\u2581", "\0", "\ud800", "\U0001f600"])
def test_a_character_outside_the_vocabulary_is_named(char):
    tokenizer = build_sentencepiece(ADDITION, vocab_size=64)
    with pytest.raises(UserError, match=rf"U\+{ord(char):04X}\b"):
        tokenizer.encode(f"3{char}7")


def test_a_space_mark_is_refused_even_where_spaces_are_known():
    tokenizer = build_sentencepiece(SPACED, vocab_size=64)
    with pytest.raises(UserError, match=r"U\+2581"):
        tokenizer.encode("3\u25817")


def test_an_end_of_sequence_token_written_in_text_does_not_end_it():
    tokenizer = build_sentencepiece(["< / s >", "<k/nu>"], vocab_size=64)
    for text in ["</s>", "<unk>"]:
        ids = tokenizer.encode(text)
        assert not set(ids) & {0, 1}
        assert tokenizer.decode(ids) == text


def test_a_vocabulary_without_room_says_how_much_it_needs():
    for model_type in ("char", "bpe"):
        with pytest.raises(UserError, match="at least 14"):
            build_sentencepiece(ADDITION, vocab_size=13, model_type=model_type)
        assert build_sentencepiece(ADDITION, vocab_size=14, model_type=model_type).vocab_size == 14


def test_a_long_line_is_not_left_out():
    tokenizer = build_sentencepiece(["ab", "c" * 5000 + "d"], vocab_size=64)
    assert tokenizer.decode(tokenizer.encode("abcd")) == "abcd"


@pytest.mark.parametrize(
    ("lines", "message"),
    [([], "at least one line"), (["", ""], "at least one line"), (["a\0"], "U\\+0000"), (["a\u2581b"], "U\\+2581")],
)
def test_text_that_makes_no_model(lines, message):
    with pytest.raises(UserError, match=message):
        build_sentencepiece(lines, vocab_size=64)


def test_text_that_holds_a_special_piece_is_refused():
    with pytest.raises(UserError, match=re.escape("'</s>'")):
        build_sentencepiece(["12</s>"], vocab_size=64)


def test_decoding_leaves_out_the_end_and_refuses_other_ids():
    tokenizer = build_sentencepiece(ADDITION, vocab_size=64)
    ids = np.array([*tokenizer.encode("62"), tokenizer.eos_id], np.int32)
    assert tokenizer.decode(ids) == "62"
    for outside in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=f"token id {outside} "):
            tokenizer.decode([outside])


def test_an_unknown_special_token_is_refused_with_the_known_ones():
    tokenizer = build_sentencepiece(ADDITION, vocab_size=64)
    with pytest.raises(UserError, match=r"'<\|im_end\|>'; it has: <unk>, </s>"):
        tokenizer.token_id("<|im_end|>")
    with pytest.raises(UserError, match="no special token '3'"):
        tokenizer.token_id("3")


def test_a_begin_of_sequence_token_in_the_vocabulary_is_used():
    tokenizer = SentencePieceTokenizer(train(bos_id=1, eos_id=2))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == (1, 2, True)


def test_models_that_cannot_be_used(tmp_path):
    with pytest.raises(UserError, match="no end-of-sequence token"):
        SentencePieceTokenizer(train(eos_id=-1, bos_id=-1))
    with pytest.raises(UserError, match=r"missing\.model.*cannot be read: No such file"):
        load_sentencepiece(tmp_path / "missing.model")
    for content in (b"", b"no model", train(bos_id=-1)[:-7]):
        (tmp_path / "bad.model").write_bytes(content)
        with pytest.raises(UserError, match=r"bad\.model.*not a SentencePiece model"):
            load_sentencepiece(tmp_path / "bad.model")
