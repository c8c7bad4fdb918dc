"""The files of a Hugging Face tokenizer: tokenizer.json and what stands beside it. Data only, no code is ever run."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_llm.types import UserError


@dataclass(frozen=True)
class HfFiles:
    """What the files say, not yet held against each other."""

    source: str  # names the tokenizer in messages
    tokenizer: Mapping[str, Any]  # tokenizer.json
    tokenizer_sha256: str
    added_tokens: Mapping[int, Mapping[str, Any]]  # added_tokens_decoder of tokenizer_config.json
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    eos_ids: Mapping[str, tuple[int, ...]]  # file name -> its eos_token_id, one or several
    chat_template: str | None


def read_hf_files(path: str | Path) -> HfFiles:
    """The files of a folder, or of the folder of a tokenizer.json.

    The chat template is chat_template.jinja if there is one, then chat_template.json, then the key of
    tokenizer_config.json (of several named ones the one named default), as `transformers` takes them. Raises UserError
    for a missing tokenizer.json and for any file or key of another form than it should have.
    """
    given = Path(path)
    file = given / "tokenizer.json" if given.is_dir() else given
    if not file.is_file():
        wanted = "has no tokenizer.json" if given.is_dir() else "does not exist"
        raise UserError(f"tokenizer.path {str(given)!r} {wanted}; give a folder with a tokenizer.json, or that file")
    if file.suffix != ".json":
        raise UserError(
            f"tokenizer.path {str(given)!r} is not a tokenizer.json; a .model file is tokenizer.kind = sentencepiece"
        )
    content = file.read_bytes()
    folder = file.parent
    config = _read(folder / "tokenizer_config.json")
    named = _read(folder / "special_tokens_map.json") | {k: v for k, v in config.items() if v is not None}
    eos_ids = {
        name: ids
        for name in ("generation_config.json", "config.json")
        if (ids := _ids(_read(folder / name), folder / name))
    }
    where = folder / "tokenizer_config.json"
    return HfFiles(
        source=str(file),
        tokenizer=_parse(content, file),
        tokenizer_sha256=hashlib.sha256(content).hexdigest(),
        added_tokens=_added(config, where),
        bos_token=_name(named, "bos_token", where),
        eos_token=_name(named, "eos_token", where),
        pad_token=_name(named, "pad_token", where),
        eos_ids=eos_ids,
        chat_template=_chat_template(folder, config),
    )


def choose_eos(files: HfFiles, ids: Mapping[str, int], eos: str | None) -> int:
    """The id that ends a completion, of a vocabulary `ids`.

    `eos`, the user's choice by its written form, comes first; then the one token that tokenizer_config.json names, if
    generation_config.json and config.json, where they give ids, have it among them; then the one id that those two
    give. Raises UserError if there is none, or if they disagree.
    """
    if eos is not None:
        if eos not in ids:
            raise UserError(f"tokenizer.eos {eos!r} is not a token of {files.source}")
        return ids[eos]
    way_out = "set tokenizer.eos to the token that ends a completion"
    if files.eos_token is not None:
        if files.eos_token not in ids:
            raise UserError(f"{files.source}: eos_token {files.eos_token!r} is not in the vocabulary; {way_out}")
        chosen = ids[files.eos_token]
        for name, others in files.eos_ids.items():
            if chosen not in others:
                raise UserError(
                    f"{files.source}: eos_token {files.eos_token!r} is {chosen}, but eos_token_id of {name} is "
                    f"{', '.join(map(str, others))}; {way_out}"
                )
        return chosen
    if not files.eos_ids:
        raise UserError(f"{files.source}: no file beside it names an end-of-sequence token; {way_out}")
    common = set.intersection(*(set(given) for given in files.eos_ids.values()))
    if len(common) != 1:
        said = "; ".join(f"{name} says {', '.join(map(str, given))}" for name, given in files.eos_ids.items())
        raise UserError(f"{files.source}: the end-of-sequence token is not certain: {said}; {way_out}")
    return common.pop()


def _parse(content: bytes, file: Path) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError as error:  # of JSON, or of UTF-8
        raise UserError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{file} holds {type(value).__name__}, an object is wanted")
    return value


def _read(file: Path) -> dict[str, Any]:
    return _parse(file.read_bytes(), file) if file.is_file() else {}


def _name(config: Mapping[str, Any], key: str, where: Path) -> str | None:
    """A token's written form, given by itself or as an object."""
    value = config.get(key)
    if isinstance(value, dict):
        value = value.get("content")
    if not isinstance(value, str | None):
        raise UserError(f"{where}: {key} is {value!r}, a token's text is wanted")
    return value or None


def _ids(config: Mapping[str, Any], where: Path) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    if value is None and isinstance(config.get("text_config"), dict):  # of a model that also sees images
        value = config["text_config"].get("eos_token_id")
    many = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in many):
        raise UserError(f"{where}: eos_token_id is {value!r}, a token id or a list of them is wanted")
    return tuple(many)


def _added(config: Mapping[str, Any], where: Path) -> dict[int, Mapping[str, Any]]:
    given = config.get("added_tokens_decoder", {})
    if not isinstance(given, dict) or not all(
        i.isdecimal() and isinstance(token, dict) and isinstance(token.get("content"), str)
        for i, token in given.items()
    ):
        raise UserError(f"{where}: added_tokens_decoder must give a token's content by its id")
    return {int(i): token for i, token in given.items()}


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except ValueError as error:
            raise UserError(f"{file} is not UTF-8 text: {error}") from error
    where = folder / "chat_template.json"
    value = _read(where).get("chat_template")
    if value is None:
        value, where = config.get("chat_template"), folder / "tokenizer_config.json"
    if isinstance(value, list):
        named = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}
        if "default" not in named:
            raise UserError(
                f"{where}: chat_template has no template named default; it has: {', '.join(map(str, named))}"
            )
        value = named["default"]
    if not isinstance(value, str | None):
        raise UserError(f"{where}: chat_template is {type(value).__name__}, a text is wanted")
    return value
