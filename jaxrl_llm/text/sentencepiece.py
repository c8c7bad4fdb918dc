"""SentencePiece models: built in memory from the task's own text, or read from a .model file.

SentencePiece: Kudo and Richardson 2018, arXiv:1808.06226.
"""

import hashlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import sentencepiece

from jaxrl_llm.text.tokenizer import check_ids, check_utf8, encode_each, find_special, unencodable
from jaxrl_llm.types import UserError

# SentencePiece writes a space as this character, so the character itself would come back as a space.
_SPACE_MARK = "\u2581"
_ERRORS_ONLY = 2  # SentencePiece's own logging level; below it the trainer prints its progress to stderr
_SPECIAL_PIECES = ("<unk>", "</s>")


class SentencePieceTokenizer:
    """A SentencePiece model as a `Tokenizer`.

    Pieces that the model's makers defined ("<think>") are part of the language: text encodes to them and they decode to
    text, as in the library. decode(encode(text)) == text for models that neither normalise nor remove white space
    (Llama 2, Mistral, Gemma: with a space put before every text, or without), not for others (T5: NFKC), nor where a
    word's space follows it.

    The vocabulary's begin-of-sequence id, where there is one, starts every prompt, as the models trained with such
    vocabularies expect; a model built by `build_sentencepiece` has none.
    """

    def __init__(
        self,
        model: bytes,
        *,
        source: str = "SentencePiece model",
        adds_bos: bool = True,
        chat_template: str | None = None,
    ):
        """`model` is the content of a .model file; `source` names it in messages. A .model file does not say whether a
        prompt starts with its begin-of-sequence id, nor has it a chat template: who knows may say so.

        Raises UserError if it is not a SentencePiece model, or has no end-of-sequence token.
        """
        if not model:  # the library takes an empty model for none at all
            raise UserError(f"{source}: empty, not a SentencePiece model")
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise UserError(f"{source}: not a SentencePiece model, or damaged; give a .model file") from error
        self._model = model
        self._may_add_bos, self._chat_template = adds_bos, chat_template
        self._vocab_size = self._processor.get_piece_size()
        self._unk_id = self._processor.unk_id()
        self._special_tokens = {
            self._processor.id_to_piece(i): i
            for i in range(self._vocab_size)
            if self._processor.is_control(i) or self._processor.is_unknown(i)
        }
        if self.eos_id < 0:
            raise UserError(f"{source}: has no end-of-sequence token, so a completion could never stop")

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_id(self) -> int:
        return self._processor.eos_id()

    @property
    def bos_id(self) -> int | None:
        bos_id = self._processor.bos_id()
        return bos_id if bos_id >= 0 else None

    @property
    def adds_bos(self) -> bool:
        return self._may_add_bos and self.bos_id is not None

    @property
    def special_tokens(self) -> Mapping[str, int]:
        return self._special_tokens

    @property
    def chat_template(self) -> str | None:
        return self._chat_template

    @property
    def fingerprint(self) -> str:
        facts = json.dumps(["sentencepiece", self._may_add_bos, self._chat_template])
        return hashlib.sha256(facts.encode() + b"\0" + self._model).hexdigest()

    def encode(self, text: str) -> list[int]:
        check_utf8(text)
        if _SPACE_MARK in text:
            raise unencodable(_SPACE_MARK, "is what SentencePiece writes for a space, and would come back as one")
        ids = self._processor.encode(text)
        if self._unk_id in ids:
            for char in text:
                if self._unk_id in self._processor.encode(char):
                    raise unencodable(char, "is not in the tokenizer's vocabulary")
            raise UserError(f"the text {text!r} has a piece that is not in the tokenizer's vocabulary")
        return ids

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        return encode_each(self.encode, parts)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._processor.decode(check_ids(ids, self._vocab_size))

    def token_id(self, special: str) -> int:
        return find_special(self._special_tokens, special)

    def save(self, path: str | Path) -> None:
        """Writes the .model file that `load_sentencepiece` reads."""
        Path(path).write_bytes(self._model)


def build_sentencepiece(
    lines: Iterable[str], *, vocab_size: int, model_type: Literal["char", "bpe"] = "char"
) -> SentencePieceTokenizer:
    """A SentencePiece model of `lines`; the same lines always give the same bytes.

    Nothing is normalised, added or trimmed: for text made of the lines' characters, decode(encode(text)) == text.
    `vocab_size` is an upper bound; ids 0 and 1 are the unknown and the end-of-sequence token, there is no
    begin-of-sequence token. Raises UserError if there is no text, if the vocabulary has no room for every character,
    or for a character that SentencePiece cannot carry.
    """
    kept = [line for line in lines if line]
    if not kept:
        raise UserError("a SentencePiece model needs at least one line of text that is not empty")
    chars = sorted(set().union(*kept))
    check_utf8("".join(chars))
    for char in ("\0", _SPACE_MARK):
        if char in chars:
            raise unencodable(char, "cannot be carried by a SentencePiece model")
    for piece in _SPECIAL_PIECES:
        if any(piece in line for line in kept):
            raise UserError(f"the text holds {piece!r}, which a SentencePiece model keeps for itself; take it out")
    needed = len(chars) + len(_SPECIAL_PIECES)
    if vocab_size < needed:
        raise UserError(
            f"tokenizer.vocab_size {vocab_size} is too small: the text has {len(chars)} different characters, and "
            f"{len(_SPECIAL_PIECES)} ids are special; give at least {needed}"
        )
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(kept),
        model_writer=model,
        model_type=model_type,
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        character_coverage=1.0,
        max_sentence_length=max(10, *(len(line.encode()) + 1 for line in kept)),  # a longer one would be left out
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        unk_id=0,
        eos_id=1,
        bos_id=-1,
        pad_id=-1,
        num_threads=1,
        minloglevel=_ERRORS_ONLY,
    )
    return SentencePieceTokenizer(model.getvalue())


def load_sentencepiece(path: str | Path) -> SentencePieceTokenizer:
    """The tokenizer in a .model file. Raises UserError if it cannot be read."""
    try:
        model = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"tokenizer.path {str(path)!r} cannot be read: {error.strerror}") from error
    return SentencePieceTokenizer(model, source=f"tokenizer.path {str(path)!r}")
