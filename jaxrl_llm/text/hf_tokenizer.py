"""Tokenizers of the Hugging Face layout: a tokenizer.json and the small files beside it.

The pipeline itself (normaliser, pre-tokenizer, model, decoder) is run by the `tokenizers` library. What the keys mean:
that library's documentation, and for the files beside it that of `transformers`.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import tokenizers

from jaxrl_llm.text.byte_level import bytes_without_token
from jaxrl_llm.text.hf_files import HfFiles, choose_eos, read_hf_files
from jaxrl_llm.text.hf_spec import add_tokens, check_spec, rename_tokens, stage_types, unknown_token, vocabulary
from jaxrl_llm.text.tokenizer import check_ids, check_utf8, find_special, unencodable
from jaxrl_llm.types import UserError

# Code points that are no characters, and in no text meant for interchange (The Unicode Standard, section 23.7).
_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))


class HfTokenizer:
    """The tokenizer of a tokenizer.json as a `Tokenizer`.

    Special are the tokens that the files call special, those that they name as begin, end or padding, and the unknown
    token. Added tokens that are not special ("<think>" of Qwen3) are part of the language: text encodes to them and
    they decode to text, as everywhere else.

    decode(encode(text)) == text for byte-level models without a normaliser (GPT-2, Llama 3, SmolLM2), and up to Unicode
    normal form C with that one (Qwen). Models that write a space as U+2581 (Llama 2, Gemma) give that character back
    as a space; other normalisers may lose more. `transformers`' removal of spaces before punctuation
    (`clean_up_tokenization_spaces`) is never applied.
    """

    def __init__(self, files: HfFiles, *, eos: str | None = None):
        """`eos` is the written form of the end-of-sequence token, where the files name none or do not agree.

        Raises UserError naming the file and what in it is missing, damaged or not supported.
        """
        self._source = files.source
        check_spec(files.tokenizer, self._source)
        spec = add_tokens(files.tokenizer, files.added_tokens, self._source)
        ids = vocabulary(spec)
        self._vocab_size = max(ids.values()) + 1
        self._eos_id = choose_eos(files, ids, eos)
        if not 0 <= self._eos_id < self._vocab_size:
            raise UserError(f"{self._source}: eos_token_id {self._eos_id} is outside its {self._vocab_size} ids")
        special = {token["content"] for token in spec["added_tokens"] if token["special"]}
        unknown = unknown_token(spec)
        special.update(name for name in (files.bos_token, files.pad_token, unknown) if name in ids)
        special.update(name for name, i in ids.items() if i == self._eos_id)
        self._special_tokens = {name: ids[name] for name in sorted(special, key=ids.__getitem__)}
        self._silent_ids = frozenset(self._special_tokens.values())
        self._bos_id = None if files.bos_token is None else ids.get(files.bos_token)

        byte_level = "ByteLevel" in stage_types(spec, "pre_tokenizer")
        self._missing_bytes = bytes_without_token(ids) if byte_level else frozenset[int]()
        if not byte_level and unknown is None and not spec["model"].get("byte_fallback"):
            raise UserError(
                f"{self._source}: the model has neither bytes nor an unknown token, so that characters outside its "
                "vocabulary would be lost without a word"
            )
        self._falls_back_to_bytes = "ByteFallback" in stage_types(spec, "decoder")
        self._spec = spec
        self._library = self._build(_MARKS[0])
        # For a text that holds the first mark itself, the last other one is kept too.
        self._mark, self._other_mark, self._other_library = _MARKS[0], "", self._library
        self._tokens = [self._library.id_to_token(i) or "" for i in range(self._vocab_size)]
        # What the file's own post-processor puts before a text decides, as in `transformers`, not add_bos_token.
        first = _load(files.tokenizer, self._source).encode("a", add_special_tokens=True).ids[:1]
        self._adds_bos = self._bos_id is not None and first == [self._bos_id]
        self._chat_template = files.chat_template
        facts = [self._eos_id, self._bos_id, self._adds_bos, self._special_tokens, self._chat_template]
        facts += [files.tokenizer_sha256, [dict(token) for token in files.added_tokens.values()]]
        self._fingerprint = hashlib.sha256(json.dumps(["hf", *facts]).encode()).hexdigest()

    def _build(self, mark: str) -> tokenizers.Tokenizer:
        """The library's tokenizer with its special tokens under names that hold `mark`, so that no text has them."""
        names = {name: _marked(mark, i) for name, i in self._special_tokens.items()}
        library = _load(rename_tokens(self._spec, names), self._source)
        for name, i in self._special_tokens.items():
            if library.token_to_id(names[name]) != i:
                raise UserError(f"{self._source}: the special token {name!r} cannot have its id {i}")
        return library

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
        return self.encode_parts([text])

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """As `Tokenizer.encode_parts`; what a token does to the white space beside it, and a model to the text after
        one, is kept."""
        text = "".join(part for part in parts if isinstance(part, str))
        check_utf8(text)
        mark, library = self._mark, self._library
        if mark in text:
            mark = next((mark for mark in _MARKS if mark not in text), "")
            if not mark:
                raise unencodable(_MARKS[0], f"stands beside all up to U+{ord(_MARKS[-1]):04X}")
            if mark != self._other_mark:
                self._other_mark, self._other_library = mark, self._build(mark)
            library = self._other_library
        whole = "".join(part if isinstance(part, str) else _marked(mark, part) for part in parts)
        ids = library.encode(whole, add_special_tokens=False).ids
        if self._loses_bytes(library, text) or [i for i in ids if i in self._silent_ids] != [
            part for part in parts if not isinstance(part, str)
        ]:
            self._refuse(library, text)
        return ids

    def _loses_bytes(self, library: tokenizers.Tokenizer, text: str) -> bool:
        """True if the text has a byte without a token, which the library would leave out without a word."""
        if not self._missing_bytes:
            return False
        normalizer: Any = library.normalizer
        normal = text if normalizer is None else normalizer.normalize_str(text)
        return not self._missing_bytes.isdisjoint(normal.encode())

    def _refuse(self, library: tokenizers.Tokenizer, text: str) -> NoReturn:
        for char in text:
            ids = library.encode(char, add_special_tokens=False).ids
            if self._loses_bytes(library, char) or not self._silent_ids.isdisjoint(ids):
                raise unencodable(char, "is not in the tokenizer's vocabulary")
        raise UserError(f"the text {text!r} has a piece that is not in the tokenizer's vocabulary")

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """As `Tokenizer.decode`; bytes that are no UTF-8 become U+FFFD, and only they do.

        (The library writes U+FFFD for all bytes of a run that is not UTF-8 as a whole, also for the characters in it,
        where a model falls back to bytes. A stream could then have to take a character back.)
        """
        spoken = [i for i in check_ids(ids, self._vocab_size) if i not in self._silent_ids]
        if not self._falls_back_to_bytes:
            return self._library.decode(spoken, skip_special_tokens=False)
        decoder: Any = self._library.decoder
        return decoder.decode(list(_without_broken_bytes([self._tokens[i] for i in spoken])))

    def token_id(self, special: str) -> int:
        return find_special(self._special_tokens, special)


def load_hf(path: str | Path, *, eos: str | None = None) -> HfTokenizer:
    """The tokenizer of a folder with a tokenizer.json, or of that file. Raises UserError as `HfTokenizer` does."""
    return HfTokenizer(read_hf_files(path), eos=eos)


def _marked(mark: str, i: int) -> str:
    return f"{mark}{i}{mark}"


def _load(spec: Mapping[str, Any], source: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(spec))
    except Exception as error:  # the library raises bare Exception for whatever it cannot use
        raise UserError(f"{source} is not a tokenizer that the tokenizers library can read: {error}") from error


def _without_broken_bytes(tokens: Sequence[str]) -> Iterator[str]:
    """The tokens, with U+FFFD in the place of each byte token ("<0xE4>") that is not part of a character."""
    at = 0
    while at < len(tokens):
        run = b""
        while at + len(run) < len(tokens) and (byte := _byte(tokens[at + len(run)])) is not None:
            run += bytes([byte])
        if not run:
            yield tokens[at]
            at += 1
            continue
        done = 0
        while done < len(run):
            length = next((n for n in (1, 2, 3, 4) if _is_character(run[done : done + n])), 0)
            yield from tokens[at + done : at + done + length] if length else ["\ufffd"]
            done += length or 1
        at += len(run)


def _byte(token: str) -> int | None:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


def _is_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False
