"""`jaxrl inspect`: what a checkpoint holds, tensor by tensor, with digests that two copies can be compared by."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp

from jaxrl_llm.checkpoints.gguf import resolve_init
from jaxrl_llm.checkpoints.gguf_file import open_gguf
from jaxrl_llm.checkpoints.hf import is_hf_folder, read_hf_tables
from jaxrl_llm.checkpoints.manifest import describe_arrays
from jaxrl_llm.checkpoints.peft import is_peft_folder, read_peft_table
from jaxrl_llm.cli.source import is_run, run_checkpoints

_BLOCK = 4 * 2**20


@dataclass(frozen=True)
class Row:
    """One array: `sha256` is of its bytes as they are stored (a run's: in row-major order)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    sha256: str


def inspect(source: str, *, step: int | None = None) -> Iterator[Row]:
    """The arrays of a run's checkpoint (by default the newest), a Hugging Face folder, an adapter's in PEFT's layout
    or a GGUF file, in order of name.

    Raises UserError if the source is none of the four, or damaged.
    """
    path = Path(source)
    if is_run(path):
        _, store, step = run_checkpoints(path, step)
        for name, row in sorted(describe_arrays(store.read_params(step)).items()):
            shape = tuple(row["shape"])
            yield Row(name, row["dtype"], shape, math.prod(shape) * jnp.dtype(row["dtype"]).itemsize, row["sha256"])
        return
    path = path if is_peft_folder(path) and not is_hf_folder(path) else resolve_init(source)
    if path.is_dir():
        tensors = read_hf_tables(path) if is_hf_folder(path) else read_peft_table(path)
        for name, tensor in sorted(tensors.items()):
            yield Row(name, tensor.kind, tensor.shape, tensor.size, tensor.sha256())
        return
    for name, tensor in sorted(open_gguf(path).tensors.items()):
        yield Row(name, tensor.kind.name, tensor.shape, tensor.size, _digest(path, tensor.start, tensor.size))


def _digest(path: Path, start: int, size: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        for at in range(0, size, _BLOCK):
            digest.update(file.read(min(_BLOCK, size - at)))
    return digest.hexdigest()


def lines(source: str, *, step: int | None = None) -> Iterator[str]:
    """`inspect` as text: name, dtype, shape, bytes and the digest's first 16 digits, then the totals."""
    arrays = numbers = size = 0
    for row in inspect(source, step=step):
        shape = "x".join(map(str, row.shape)) or "scalar"
        yield f"{row.name}  {row.dtype}  {shape}  {row.size}  {row.sha256[:16]}"
        arrays, numbers, size = arrays + 1, numbers + math.prod(row.shape), size + row.size
    yield f"{arrays} arrays, {numbers} numbers, {size} bytes"
