"""The manifest beside a checkpoint's arrays: what was saved, by whom it may be read, and a checksum of everything."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm.global_arrays import host_parts

FORMAT = 1


class CorruptCheckpoint(Exception):
    """A checkpoint is not what was saved; the message says what is wrong with it."""


def array_digest(array: Any) -> str:
    """SHA-256 of the array's bytes in row-major order, as hexadecimal digits; over several processes all must call."""
    digest = hashlib.sha256()
    for part in host_parts(array):
        digest.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def describe_files(root: Path) -> dict[str, str]:
    """SHA-256 of every file under a directory, by relative path."""
    described = {}
    for path in sorted(p for p in root.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            described[path.relative_to(root).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return described


def check_files(described: Mapping[str, str], root: Path) -> None:
    """Raises CorruptCheckpoint naming the first file that is missing, unknown or changed."""
    found = describe_files(root)
    for name in sorted({*described, *found}):
        if described.get(name) != found.get(name):
            what = "missing" if name not in found else "not what was saved (its checksum differs)"
            raise CorruptCheckpoint(f"file {name} is {what}")


def named_leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Every leaf with its dotted path, such as `params.layers.q`."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        yield jax.tree_util.keystr(path, simple=True, separator="."), leaf


def describe_arrays(state: Any) -> dict[str, dict[str, Any]]:
    """Shape, dtype and digest of every array; brings each to the host in turn."""
    return {
        name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "sha256": array_digest(leaf)}
        for name, leaf in named_leaves(state)
    }


def check_arrays(described: Mapping[str, Mapping[str, Any]], state: Any) -> None:
    """Raises CorruptCheckpoint naming the first array whose bytes are not those that were saved."""
    # All are read before one is refused: no process may stop reading while others go on.
    bad = [name for name, leaf in named_leaves(state) if array_digest(leaf) != described[name]["sha256"]]
    if bad:
        raise CorruptCheckpoint(f"array {bad[0]} is not what was saved (its checksum differs)")


def _text(body: Mapping[str, Any]) -> str:
    return json.dumps(body, sort_keys=True, allow_nan=False)


def check_json(extras: Mapping[str, Any]) -> None:
    """Raises ValueError or TypeError unless JSON gives the same value back (no tuples, integer keys or NaN)."""
    if json.loads(_text(extras)) != extras:
        raise ValueError("extras would come back changed from JSON; use lists, string keys and plain numbers")


def write_manifest(path: Path, body: Mapping[str, Any]) -> None:
    """Writes the JSON with a checksum of its own, onto the disk before it returns."""
    digest = hashlib.sha256(_text(body).encode()).hexdigest()
    with path.open("x") as file:
        file.write(_text({"sha256": digest, "manifest": dict(body)}))
        file.flush()
        os.fsync(file.fileno())


def read_manifest(path: Path) -> dict[str, Any]:
    """Raises CorruptCheckpoint if the file is missing, cut short, changed, or of another format."""
    try:
        stored = json.loads(path.read_text())
        body, digest = stored["manifest"], stored["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpoint(f"{path.name} cannot be read ({type(error).__name__})") from error
    if hashlib.sha256(_text(body).encode()).hexdigest() != digest:
        raise CorruptCheckpoint(f"{path.name} is not what was saved (its checksum differs)")
    if body["format"] != FORMAT:
        raise CorruptCheckpoint(f"{path.name} has format {body['format']}, this version reads {FORMAT}")
    return body
