"""Every kind of tokenizer, token by token: the pieces joined are the whole text, and none holds half a character."""

import numpy as np
import pytest
from gguf_families import byte_level_metadata, sentencepiece_model
from hf_families import FAMILIES, write_family
from tokenizer_strings import strings

from jaxrl_llm.text.gguf_tokenizer import GgufTokenizer
from jaxrl_llm.text.hf_tokenizer import load_hf
from jaxrl_llm.text.incremental import IncrementalDecoder
from jaxrl_llm.text.sentencepiece import SentencePieceTokenizer

KINDS = [*FAMILIES, "gguf", "sentencepiece", "sentencepiece without dummy prefix"]


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory):
    if request.param == "gguf":
        return GgufTokenizer(byte_level_metadata("qwen2"), source="t.gguf")
    if request.param.startswith("sentencepiece"):
        return SentencePieceTokenizer(sentencepiece_model(add_dummy_prefix="without" not in request.param))
    return load_hf(write_family(request.param, tmp_path_factory.mktemp("family")))


def streamed(tokenizer, ids):
    decoder = IncrementalDecoder(tokenizer.decode)
    return [decoder.add([i], last=at == len(ids) - 1) for at, i in enumerate(ids)]


def test_real_text(tokenizer):
    for text in strings(2000, without="\ufffd"):
        ids = tokenizer.encode(text)
        pieces = streamed(tokenizer, ids)
        whole = tokenizer.decode(ids)
        assert "".join(pieces) == whole
        assert "\ufffd" in whole or not any("\ufffd" in piece for piece in pieces)


def test_random_ids(tokenizer):
    source = np.random.default_rng(0)
    bytes_of_characters = tokenizer.encode("\u4f61\U0001f601\u00f0")
    for _ in range(500):
        ids = source.integers(0, tokenizer.vocab_size, source.integers(1, 24))
        ids = np.where(source.random(len(ids)) < 0.3, source.choice(bytes_of_characters, len(ids)), ids).tolist()
        pieces = streamed(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids)
        # Bytes that never become a character are seen, but only once it is certain that they never do.
        assert not any(piece.endswith("\ufffd") for piece in pieces[:-1])
