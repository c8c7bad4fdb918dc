"""SentencePiece and GGUF tokenizers against stored results of llama.cpp and against the sentencepiece library."""

import re
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from gguf_families import PRE_TOKENIZERS, byte_level_metadata, sentencepiece_metadata, sentencepiece_model
from tokenizer_strings import digests, strings

from jaxrl_llm.text.gguf_tokenizer import GgufTokenizer, tokenizer_from_gguf
from jaxrl_llm.text.sentencepiece import SentencePieceTokenizer, load_sentencepiece
from jaxrl_llm.types import UserError

DATA = Path(__file__).parents[1] / "data"

# Options of the library's trainer, by what they are like, and whether every text comes back.
MODELS = {
    "llama": ({}, True),
    "no dummy prefix": ({"add_dummy_prefix": False}, True),
    "suffix": ({"treat_whitespace_as_suffix": True, "vocab_size": 400}, False),
    "unigram": ({"model_type": "unigram", "vocab_size": 400}, True),
    "normalised": ({"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True}, False),
}


def differing(tokenizer, texts, stored):
    ours = digests([tokenizer.encode(text) for text in texts])
    return [text for text, equal in zip(texts, ours == stored, strict=True) if not equal]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_gguf_ids_are_those_of_llama_cpp(pre):
    tokenizer = GgufTokenizer(byte_level_metadata(pre), source="t.gguf")
    with np.load(DATA / "llama_cpp_tokens.npz") as stored:
        assert differing(tokenizer, strings(2200), stored[pre]) == []
    special = set(tokenizer.special_tokens.values())
    for text in (*strings(300), *tokenizer.special_tokens):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not special & set(ids)


def test_words_of_the_vocabularys_makers_are_one_token_anywhere():
    tokenizer = GgufTokenizer(byte_level_metadata("qwen2"), source="t.gguf")
    ids = tokenizer.encode("a<tool_call><think>b")
    assert len(ids) == 4
    assert tokenizer.decode(ids) == "a<tool_call><think>b"
    assert "<think>" not in tokenizer.special_tokens


def test_sentencepiece_ids_are_those_of_llama_cpp():
    tokenizer = load_sentencepiece(DATA / "llama_like.model")
    with np.load(DATA / "llama_cpp_tokens.npz") as stored:
        assert differing(tokenizer, strings(2200), stored["sentencepiece"]) == []


def test_what_a_model_file_does_not_say_is_in_the_fingerprint():
    model = (DATA / "llama_like.model").read_bytes()
    options = ({}, {"adds_bos": False}, {"chat_template": "x"})
    assert len({SentencePieceTokenizer(model, **one).fingerprint for one in options}) == 3
    assert SentencePieceTokenizer(model, source="other").fingerprint == SentencePieceTokenizer(model).fingerprint


def test_a_gguf_files_sentencepiece_model_is_the_model():
    model = load_sentencepiece(DATA / "llama_like.model")
    metadata = sentencepiece_metadata((DATA / "llama_like.model").read_bytes())
    tokenizer = tokenizer_from_gguf(metadata, source="t.gguf")
    with np.load(DATA / "llama_cpp_tokens.npz") as stored:
        assert differing(tokenizer, strings(2200), stored["sentencepiece"]) == []
    assert tokenizer.special_tokens == model.special_tokens
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == (1, 2, False)
    assert tokenizer.decode([1, *tokenizer.encode("  a"), 2]) == "  a"
    more = metadata | {"tokenizer.ggml.add_space_prefix": False, "tokenizer.chat_template": "x"}
    del more["tokenizer.ggml.add_bos_token"]
    bare = tokenizer_from_gguf(more, source="t.gguf")
    assert (bare.adds_bos, bare.chat_template) == (True, "x")
    assert bare.encode(" the") == tokenizer.encode("the") != bare.encode("the")
    assert len({one.fingerprint for one in (model, tokenizer, bare)}) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"scores": [1, 2]}, "tokenizer.ggml.scores must be a list of float"),
        ({"scores": [0.0]}, "tokenizer.ggml.tokens, scores and token_type have 420, 1 and 420"),
        ({"token_type": [7] * 420}, "'<unk>' has token_type 7"),
        ({"eos_token_id": 420}, "eos_token_id 420 is outside the vocabulary of 420"),
        ({"tokens": ["a"] * 420}, "not a SentencePiece model"),
    ],
)
def test_damaged_sentencepiece_metadata_is_named(change, message):
    metadata = sentencepiece_metadata((DATA / "llama_like.model").read_bytes())
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises(UserError, match=re.escape(message)) as error:
        tokenizer_from_gguf(metadata, source="t.gguf")
    assert str(error.value).startswith("t.gguf: ")


@pytest.mark.parametrize("kind", MODELS)
def test_sentencepiece_ids_are_the_librarys(kind):
    options, exact = MODELS[kind]
    model = sentencepiece_model(**options)
    tokenizer = SentencePieceTokenizer(model)
    library = sentencepiece.SentencePieceProcessor()
    library.LoadFromSerializedProto(model)
    special = set(tokenizer.special_tokens.values())
    assert {"<s>", "</s>", "<unk>", "[INST]"} <= set(tokenizer.special_tokens)
    assert "<think>" not in tokenizer.special_tokens
    changed = 0
    for text in strings(2200):
        ids = tokenizer.encode(text)
        assert ids == library.encode(text)
        assert not special & set(ids)
        changed += tokenizer.decode(ids) != text
    assert changed == 0 if exact else changed > 0
    for text in ("<s>", "[INST] x [/INST]", "a</s>b"):
        assert not special & set(tokenizer.encode(text))
    think = library.piece_to_id("<think>")
    assert tokenizer.encode("x<think>y").count(think) == 1
    assert tokenizer.decode([tokenizer.bos_id, think, tokenizer.eos_id]) == "<think>"


def test_without_bytes_a_character_outside_the_vocabulary_is_named():
    tokenizer = SentencePieceTokenizer(sentencepiece_model(byte_fallback=False, vocab_size=200))
    with pytest.raises(UserError, match=r"U\+0007"):
        tokenizer.encode("What\x07")
