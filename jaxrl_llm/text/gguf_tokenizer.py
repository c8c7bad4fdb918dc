"""The tokenizer that a GGUF file carries in its metadata: byte-level BPE with a named pre-tokenizer.

Byte-level BPE: Radford et al. 2019 (GPT-2). What each metadata key means: the GGUF specification, section
"Tokenizer". The pre-tokenizers are compared with llama.cpp in tests/reference/.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxrl_llm.text.byte_level import bytes_without_token
from jaxrl_llm.text.gguf_sentencepiece import sentencepiece_from_gguf
from jaxrl_llm.text.tokenizer import Tokenizer, check_ids, check_utf8, encode_each, find_special, unencodable
from jaxrl_llm.types import UserError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # tokenizer.ggml.token_type

_FINGERPRINTED = (
    "model",
    "pre",
    "tokens",
    "token_type",
    "merges",
    "bos_token_id",
    "eos_token_id",
    "add_bos_token",
)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    """Every digit by itself, then as GPT-2."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(numbers: str) -> pre_tokenizers.PreTokenizer:
    """Words by a pattern instead of GPT-2's, then bytes. `numbers` matches digits that may stay together."""
    contractions = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
    words = rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    pattern = tokenizers.Regex(rf"{contractions}|{words}|\s*[\r\n]+|\s+(?!\S)|\s+")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), as_bytes])


def _llama3() -> pre_tokenizers.PreTokenizer:
    return _split(r"\p{N}{1,3}")


def _qwen2() -> pre_tokenizers.PreTokenizer:
    return _split(r"\p{N}")


_PRE_TOKENIZERS = {"gpt-2": _gpt2, "smollm": _smollm, "llama-bpe": _llama3, "qwen2": _qwen2}
_WHOLE_WORDS = ("llama-bpe",)  # a word that is a token is never put together by merges


class GgufTokenizer:
    """Byte-level BPE from GGUF metadata, as a `Tokenizer`; decode(encode(text)) == text.

    As in llama.cpp no text is normalised, also where the same model's tokenizer.json asks for it (Qwen: NFC).
    """

    def __init__(self, metadata: Mapping[str, Any], *, source: str):
        """`metadata` holds the `tokenizer.*` keys of a GGUF file; `source` names the file in messages.

        Raises UserError naming the key that is missing, damaged or not supported.
        """
        self._source = source
        kind = self._field(metadata, "tokenizer.ggml.model", str)
        if kind != "gpt2":
            raise UserError(
                f"{source}: tokenizer.ggml.model {kind!r} is not supported; known: 'gpt2' (byte-level BPE) "
                "and 'llama' (SentencePiece)"
            )
        pre = self._field(metadata, "tokenizer.ggml.pre", str)
        if pre not in _PRE_TOKENIZERS:
            known = ", ".join(repr(name) for name in _PRE_TOKENIZERS)
            raise UserError(f"{source}: tokenizer.ggml.pre {pre!r} is not a known pre-tokenizer; known: {known}")
        tokens: list[str] = self._field(metadata, "tokenizer.ggml.tokens", list)
        token_types: list[int] = self._field(metadata, "tokenizer.ggml.token_type", list)
        merges: list[str] = self._field(metadata, "tokenizer.ggml.merges", list)
        if not tokens or len(token_types) != len(tokens):
            raise UserError(
                f"{source}: tokenizer.ggml.tokens has {len(tokens)} entries, tokenizer.ggml.token_type "
                f"{len(token_types)}; they must be as many, and not none"
            )
        for token, token_type in zip(tokens, token_types, strict=True):
            if token_type not in (_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED):
                raise UserError(f"{source}: token {token!r} has token_type {token_type}, which is not supported")

        vocab = {token: i for i, token in enumerate(tokens)}
        if len(vocab) != len(tokens):
            twice = next(token for i, token in enumerate(tokens) if vocab[token] != i)
            raise UserError(f"{source}: tokenizer.ggml.tokens holds {twice!r} twice")
        # No special token is made known to the library: that is what keeps it from finding them in a text.
        self._special_tokens = {t: i for i, t in enumerate(tokens) if token_types[i] in (_UNKNOWN, _CONTROL)}
        self._silent_ids = frozenset(
            i for i, token_type in enumerate(token_types) if token_type not in (_NORMAL, _USER_DEFINED)
        )
        try:
            # A part of a merge may begin with a space of its own, never end with one.
            pairs = [(merge[: merge.index(" ", 1)], merge[merge.index(" ", 1) + 1 :]) for merge in merges]
            self._bpe = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre in _WHOLE_WORDS))
        except Exception as error:  # the library raises bare Exception for a merge of unknown parts
            raise UserError(f"{source}: tokenizer.ggml.merges does not fit the tokens: {error}") from error
        self._bpe.pre_tokenizer = _PRE_TOKENIZERS[pre]()
        self._bpe.decoder = decoders.ByteLevel()
        # Words that are one token wherever they stand ("<tool_call>"), part of the language.
        words = [tokens[i] for i, token_type in enumerate(token_types) if token_type == _USER_DEFINED]
        self._bpe.add_tokens([tokenizers.AddedToken(word, normalized=False) for word in words])
        self._missing_bytes = bytes_without_token(vocab)

        self._vocab_size = len(tokens)
        self._eos_id = self._special_id(metadata, "tokenizer.ggml.eos_token_id")
        has_bos = "tokenizer.ggml.bos_token_id" in metadata
        self._bos_id = self._special_id(metadata, "tokenizer.ggml.bos_token_id") if has_bos else None
        self._adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", False))  # the format's default for BPE
        if self._adds_bos and self._bos_id is None:
            raise UserError(f"{source}: tokenizer.ggml.add_bos_token is set but tokenizer.ggml.bos_token_id is missing")
        self._chat_template = metadata.get("tokenizer.chat_template")
        facts = {key: metadata.get(f"tokenizer.ggml.{key}") for key in _FINGERPRINTED}
        self._fingerprint = hashlib.sha256(json.dumps(["gguf", facts, self._chat_template]).encode()).hexdigest()

    def _field(self, metadata: Mapping[str, Any], key: str, kind: type) -> Any:
        if key not in metadata:
            raise UserError(f"{self._source}: {key} is missing, so its tokenizer cannot be built")
        value = metadata[key]
        if not isinstance(value, kind):
            raise UserError(f"{self._source}: {key} is {type(value).__name__}, {kind.__name__} is wanted")
        return value

    def _special_id(self, metadata: Mapping[str, Any], key: str) -> int:
        value = self._field(metadata, key, int)
        if not 0 <= value < self._vocab_size:
            raise UserError(f"{self._source}: {key} {value} is outside the vocabulary of {self._vocab_size}")
        return value

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_id(self) -> int:
        return self._eos_id

    @property
    def bos_id(self) -> int | None:
        return self._bos_id

    @property
    def adds_bos(self) -> bool:
        return self._adds_bos

    @property
    def special_tokens(self) -> Mapping[str, int]:
        return self._special_tokens

    @property
    def chat_template(self) -> str | None:
        return self._chat_template

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def encode(self, text: str) -> list[int]:
        check_utf8(text)
        # The library would leave such bytes out without a word.
        if not self._missing_bytes.isdisjoint(text.encode()):
            char = next(char for char in text if not self._missing_bytes.isdisjoint(char.encode()))
            raise unencodable(char, "is not in the tokenizer's vocabulary")
        return self._bpe.encode(text, add_special_tokens=False).ids

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        return encode_each(self.encode, parts)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """As `Tokenizer.decode`; bytes that are no UTF-8 (half a character) become U+FFFD."""
        spoken = [i for i in check_ids(ids, self._vocab_size) if i not in self._silent_ids]
        return self._bpe.decode(spoken, skip_special_tokens=False)

    def token_id(self, special: str) -> int:
        return find_special(self._special_tokens, special)


def tokenizer_from_gguf(metadata: Mapping[str, Any], *, source: str) -> Tokenizer:
    """The tokenizer of a GGUF file, of either kind that such files carry. Raises UserError naming the key that is
    missing, damaged or not supported."""
    if metadata.get("tokenizer.ggml.model") == "llama":
        return sentencepiece_from_gguf(metadata, source=source)
    return GgufTokenizer(metadata, source=source)
