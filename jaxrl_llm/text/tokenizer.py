"""What the rest of the house may ask of a tokenizer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, SupportsInt

import numpy as np

from jaxrl_llm.types import UserError


class Tokenizer(Protocol):
    """Text to token ids and back.

    Text is untrusted: a special token written out in it ("<|im_end|>") is encoded as ordinary characters. Special
    ids are reached through `token_id` alone, so nobody who can write a prompt can end a turn.
    """

    @property
    def vocab_size(self) -> int:
        """Ids are 0 .. vocab_size - 1."""
        ...

    @property
    def eos_id(self) -> int:
        """Ends a completion."""
        ...

    @property
    def bos_id(self) -> int | None:
        """The vocabulary's begin-of-sequence id, if it has one; whether a prompt starts with it is `adds_bos`."""
        ...

    @property
    def adds_bos(self) -> bool:
        """True if a prompt without a chat template starts with `bos_id`."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids that no text encodes to, by their written form."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The model's own chat template (Jinja), if it brings one."""
        ...

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) of all that decides the ids: equal fingerprints encode and decode equally."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, nothing put before or after it. Raises UserError for a character the vocabulary lacks."""
        ...

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """Ids of texts with the ids of special tokens between them, as if these were written there by their names.
        Raises UserError as `encode` does."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of `ids`; special tokens are left out. Raises ValueError for an id outside the vocabulary."""
        ...

    def token_id(self, special: str) -> int:
        """Id of one special token. Raises UserError for an unknown one."""
        ...


class WithSpareIds:
    """`tokenizer` for a model that has more rows than it has ids, as many published ones do.

    Such a model may sample any of its rows. Those without a token have no text, like special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._tokenizer, self.vocab_size = tokenizer, vocab_size

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy asks before it has anything to ask
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        known = self._tokenizer.vocab_size
        return self._tokenizer.decode([i for i in check_ids(ids, self.vocab_size) if i < known])


def encode_each(encode: Callable[[str], list[int]], parts: Sequence[str | int]) -> list[int]:
    """`Tokenizer.encode_parts` where what stands beside a special token does not change a text's ids."""
    return [i for part in parts for i in (encode(part) if isinstance(part, str) else [part])]


def find_special(special_tokens: Mapping[str, int], special: str) -> int:
    """The id of `special`. Raises UserError naming the special tokens there are."""
    if special not in special_tokens:
        known = ", ".join(sorted(special_tokens, key=lambda name: special_tokens[name])) or "none"
        raise UserError(f"the tokenizer has no special token {special!r}; it has: {known}")
    return special_tokens[special]


def check_ids(ids: Iterable[SupportsInt], vocab_size: int) -> list[int]:
    """`ids` as plain integers. Raises ValueError for an id outside the vocabulary."""
    checked = [int(i) for i in ids]
    for i in checked:
        if not 0 <= i < vocab_size:
            raise ValueError(f"token id {i} is outside the vocabulary of {vocab_size}")
    return checked


def unencodable(char: str, why: str) -> UserError:
    """The error for a character that cannot become token ids."""
    return UserError(f"the character {char!r} (U+{ord(char):04X}) in a text {why}; take it out of the text")


def check_utf8(text: str) -> None:
    """Raises UserError for half of a surrogate pair, which is not a character and has no bytes."""
    for char in text:
        if "\ud800" <= char <= "\udfff":
            raise unencodable(char, "is half of a surrogate pair")
