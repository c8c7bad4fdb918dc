"""A version's weights on the host, as they travel: named leaves, a digest of each and one of all."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import jax
import numpy as np

from jaxrl_llm.types import Params

_HASHERS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class Leaf:
    """One array, contiguous in C order; `sha256` is of its bytes."""

    path: str
    array: np.ndarray
    sha256: bytes

    @property
    def raw(self) -> memoryview:
        return self.array.reshape(-1).view(np.uint8).data

    @property
    def line(self) -> str:
        return f"{self.path} {self.array.dtype} {self.array.shape} {self.sha256.hex()}\n"


@dataclass(frozen=True)
class Snapshot:
    """`leaves` in the order of their paths; `digest` is the sha256 over their paths, dtypes, shapes and digests: equal
    exactly when the weights are. `on_device` are the same leaves where they may be lent from (see `transfer`)."""

    version: int
    leaves: tuple[Leaf, ...]
    digest: str
    on_device: Mapping[str, jax.Array] | None = field(default=None, compare=False)

    @property
    def nbytes(self) -> int:
        return sum(leaf.array.nbytes for leaf in self.leaves)


def leaf_name(path: tuple) -> str:
    """Keys joined by dots."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def device_leaves(params: Params) -> dict[str, jax.Array] | None:
    """name -> array of every leaf where it is; None unless all are on devices of this process."""
    leaves = {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    here = all(isinstance(leaf, jax.Array) and leaf.is_fully_addressable for leaf in leaves.values())
    return leaves if here else None


def named(params: Params) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array on the host) of every leaf, one at a time."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        yield leaf_name(path), np.asarray(leaf)


def hashed(name: str, array: np.ndarray) -> Leaf:
    """The leaf of one array; a copy only where that is not contiguous."""
    array = np.ascontiguousarray(array).reshape(array.shape)
    return Leaf(name, array, hashlib.sha256(array.reshape(-1).view(np.uint8).data).digest())


def take_snapshot(version: int, leaves: Iterable[tuple[str, np.ndarray]]) -> Snapshot:
    """Digest named arrays, on a few threads: hashing is slower than a copy, and lets go of the interpreter."""
    with ThreadPoolExecutor(_HASHERS, thread_name_prefix="digest") as pool:
        made = sorted(pool.map(lambda pair: hashed(*pair), leaves), key=lambda leaf: leaf.path)
    return Snapshot(version, tuple(made), digest_of(made))


def digest_of(leaves: Iterable[Leaf]) -> str:
    """The digest of a whole from those of its leaves, in the order of their paths."""
    return hashlib.sha256("".join(leaf.line for leaf in leaves).encode()).hexdigest()


def digest(params: Params) -> str:
    """sha256 over paths, dtypes, shapes and bytes of all leaves: equal exactly when the weights are."""
    return take_snapshot(0, named(params)).digest
