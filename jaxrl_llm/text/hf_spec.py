"""The content of a tokenizer.json: what of it we support, and changes to it before the library reads it."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl_llm.types import UserError

_MODELS = ("BPE", "Unigram", "WordLevel")
# Decoders whose text only grows with more tokens. (WordPiece and CTC take spaces or letters back.)
_DECODERS = ("ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace")
_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}


def check_spec(spec: Mapping[str, Any], source: str) -> None:
    """Raises UserError, with the file's name `source`, for a tokenizer.json that cannot be used here."""
    model = spec.get("model")
    if not isinstance(model, dict) or not isinstance(spec.get("added_tokens", []), list):
        raise UserError(f"{source} is not a tokenizer.json: it has no model, or added_tokens is no list")
    kind = model.get("type")
    if kind not in _MODELS:
        raise UserError(f"{source}: model type {kind!r} is not supported; known: {', '.join(_MODELS)}")
    if not isinstance(model.get("vocab"), list if kind == "Unigram" else dict) or not model["vocab"]:
        raise UserError(f"{source}: the model's vocab is missing, empty or of another form than {kind} has")
    vocab: Any = model["vocab"]
    entries = vocab if kind == "Unigram" else [[*item] for item in vocab.items()]
    if bad := [entry for entry in entries if not _is_entry(entry, float if kind == "Unigram" else int)]:
        raise UserError(f"{source}: the model's vocab holds {bad[0]!r}")
    for token in spec.get("added_tokens", []):
        if not isinstance(token, dict) or not isinstance(token.get("content"), str) or type(token.get("id")) is not int:
            raise UserError(f"{source}: added_tokens holds {token!r}, which has no content or no id")
    if "ByteLevel" in stage_types(spec, "normalizer"):
        raise UserError(f"{source}: the normalizer ByteLevel is not supported")
    for decoder in stage_types(spec, "decoder"):
        if decoder not in _DECODERS:
            raise UserError(f"{source}: the decoder {decoder} is not supported; known: {', '.join(_DECODERS)}")


def _is_entry(entry: Any, kind: type) -> bool:
    return (
        isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) and isinstance(entry[1], kind | int)
    )


def stage_types(spec: Mapping[str, Any], stage: str) -> list[str]:
    """The types of a stage of the pipeline ("normalizer", "pre_tokenizer", "decoder"), sequences taken apart."""
    return list(_types(spec.get(stage)))


def _types(stage: Any) -> Iterator[str]:
    if not isinstance(stage, dict):
        return
    if stage.get("type") == "Sequence":
        for key in ("normalizers", "pretokenizers", "decoders"):
            for one in stage.get(key) or []:
                yield from _types(one)
    else:
        yield str(stage.get("type"))


def unknown_token(spec: Mapping[str, Any]) -> str | None:
    """What the model gives for a character that it does not know, if it has such a token."""
    model = spec["model"]
    if model["type"] == "Unigram":
        i = model.get("unk_id")
        return None if i is None else model["vocab"][i][0]
    unknown = model.get("unk_token")
    return unknown if unknown in vocabulary(spec) else None


def vocabulary(spec: Mapping[str, Any]) -> dict[str, int]:
    """The ids by token, of the model and of the added tokens."""
    vocab = spec["model"]["vocab"]
    ids = {piece: i for i, (piece, _) in enumerate(vocab)} if isinstance(vocab, list) else dict(vocab)
    return ids | {token["content"]: token["id"] for token in spec.get("added_tokens", [])}


def add_tokens(spec: Mapping[str, Any], tokens: Mapping[int, Mapping[str, Any]], source: str) -> dict[str, Any]:
    """`spec` with the added tokens of tokenizer_config.json, whose flags win. Raises UserError if an id means another
    token there."""
    added = {token["id"]: _FLAGS | token for token in spec.get("added_tokens", [])}
    names = {i: name for name, i in vocabulary(spec).items()}
    for i, token in sorted(tokens.items()):
        if names.get(i, token["content"]) != token["content"]:
            raise UserError(
                f"{source}: the id {i} is {names[i]!r}, but {token['content']!r} in added_tokens_decoder of "
                "tokenizer_config.json"
            )
        added[i] = _FLAGS | added.get(i, {}) | token | {"id": i}
    return {
        **spec,
        "added_tokens": [{key: token[key] for key in ("id", "content", *_FLAGS)} for token in added.values()],
    }


def rename_tokens(spec: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """`spec` with tokens under other names, all of them special, which nothing but those names leads to.

    What would be put around a text, cut off or filled up is left out.
    """
    model = dict(spec["model"])
    if isinstance(model["vocab"], list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {names.get(token, token): i for token, i in model["vocab"].items()}
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if names.keys().isdisjoint(_concerned(merge))]
    added = [
        {**token, "content": names[token["content"]], "special": True} if token["content"] in names else token
        for token in spec["added_tokens"]
    ]
    known = {token["content"] for token in spec["added_tokens"]}
    ids = vocabulary(spec)
    added += [
        {**_FLAGS, "id": ids[name], "content": new, "special": True} for name, new in names.items() if name not in known
    ]
    added.sort(key=lambda token: token["id"])
    return {**spec, "model": model, "added_tokens": added, "post_processor": None, "truncation": None, "padding": None}


def _concerned(merge: Any) -> tuple[str, str, str]:
    """Both parts of a merge, and what it makes of them."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right, left + right
