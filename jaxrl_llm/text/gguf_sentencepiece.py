"""The SentencePiece model that a GGUF file carries in its metadata (Llama 2, Mistral, Gemma), as a .model file's bytes.

What each metadata key means: the GGUF specification, section "Tokenizer". The piece types are SentencePiece's own.
"""

from collections.abc import Mapping
from typing import Any

from sentencepiece import sentencepiece_model_pb2

from jaxrl_llm.text.sentencepiece import SentencePieceTokenizer
from jaxrl_llm.types import UserError

_MESSAGES: Any = sentencepiece_model_pb2  # its classes are made at import
_TYPES = range(1, 7)
_BYTE = 6


def sentencepiece_from_gguf(metadata: Mapping[str, Any], *, source: str) -> SentencePieceTokenizer:
    """The tokenizer in the `tokenizer.*` keys of a GGUF file whose tokenizer.ggml.model is "llama".

    Where the file names no begin or end, the pieces that SentencePiece itself calls so count ("<s>", "</s>").
    Raises UserError naming the key that is missing, damaged or not supported.
    """
    tokens = _list(metadata, "tokens", str, source)
    scores = _list(metadata, "scores", float, source)
    types = _list(metadata, "token_type", int, source)
    if not tokens or not len(tokens) == len(scores) == len(types):
        raise UserError(
            f"{source}: tokenizer.ggml.tokens, scores and token_type have {len(tokens)}, {len(scores)} and "
            f"{len(types)} entries; they must be as many, and not none"
        )
    proto: Any = _MESSAGES.ModelProto()
    for token, score, kind in zip(tokens, scores, types, strict=True):
        if kind not in _TYPES:
            raise UserError(f"{source}: token {token!r} has token_type {kind}, which is not supported")
        proto.pieces.add(piece=token, score=score, type=kind)
    trainer = proto.trainer_spec
    trainer.model_type = _MESSAGES.TrainerSpec.ModelType.Value("BPE")
    trainer.vocab_size = len(tokens)
    trainer.byte_fallback = _BYTE in types
    for name, key, default in (("unk", "unknown", 0), ("bos", "bos", -1), ("eos", "eos", -1), ("pad", "padding", -1)):
        i = metadata.get(f"tokenizer.ggml.{key}_token_id", default)
        if not isinstance(i, int) or not -1 <= i < len(tokens):
            raise UserError(f"{source}: tokenizer.ggml.{key}_token_id {i!r} is outside the vocabulary of {len(tokens)}")
        setattr(trainer, f"{name}_id", i)
        if i >= 0:
            setattr(trainer, f"{name}_piece", tokens[i])
    normalizer = proto.normalizer_spec
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    normalizer.remove_extra_whitespaces = bool(metadata.get("tokenizer.ggml.remove_extra_whitespaces", False))
    return SentencePieceTokenizer(
        proto.SerializeToString(deterministic=True),
        source=source,
        adds_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", True)),  # the format's default for this model
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _list(metadata: Mapping[str, Any], key: str, kind: type, source: str) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if values is None:
        raise UserError(f"{source}: tokenizer.ggml.{key} is missing, so its tokenizer cannot be built")
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise UserError(f"{source}: tokenizer.ggml.{key} must be a list of {kind.__name__}")
    return values
