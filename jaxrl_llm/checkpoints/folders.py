"""What folders of weights have in common: JSON objects in them, and that a new one appears complete or not at all."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxrl_llm.types import UserError


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object of a file. Raises UserError naming the file if it cannot be read or holds none."""
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no object")
    return value


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """An empty folder to write in, which becomes `path` when all went well.

    Raises UserError if `path` exists, before anything is written, or cannot be written.
    """
    if path.exists():
        raise UserError(f"{path} exists; give a folder that does not")
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        unfinished.rename(path)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise UserError(f"{path} could not be written: {error}; free some space or check the directory") from error
