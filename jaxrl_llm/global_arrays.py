"""Arrays over the devices of several processes: from host arrays that all of them hold, and back to the host."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

# What a device holds besides when an array is read whole, part by part.
_PART_BYTES = 2**26


def place(tree: Any, shardings: Any, *, may_alias: bool = False) -> Any:
    """The tree's arrays (numpy or jax) where `shardings` says: copies, unless they need not move and `may_alias`.

    Over several processes each of them must hold the same host arrays and puts only its own part on its devices;
    nothing checks that they are the same.
    """

    def put(sharding: jax.sharding.Sharding, x: Any) -> Any:
        if x is None or sharding.is_fully_addressable or (isinstance(x, jax.Array) and not x.is_fully_addressable):
            return jax.device_put(x, sharding, may_alias=may_alias)
        host = np.asarray(x)
        # A copy: the CPU backend would take the caller's memory over, and donated arrays are written to.
        return jax.make_array_from_callback(host.shape, sharding, lambda part: np.array(host[part]))

    return jax.tree.map(put, shardings, tree)


@partial(jax.jit, static_argnames=("count", "everywhere"))
def _rows(x: jax.Array, start: jax.Array, *, count: int, everywhere: NamedSharding) -> jax.Array:
    return lax.with_sharding_constraint(lax.dynamic_slice_in_dim(x, start, count), everywhere)


def host_parts(x: Any) -> Iterator[np.ndarray]:
    """The array on the host, in parts along its first axis where it lies on the devices of several processes.

    Every process must then read all parts, and gets them.
    """
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        yield np.asarray(x)
        return
    if not isinstance(x.sharding, NamedSharding):
        raise TypeError(f"an array over several processes is placed by {x.sharding}; a NamedSharding is wanted")
    everywhere = NamedSharding(x.sharding.mesh, PartitionSpec())
    rows = max(1, _PART_BYTES // max(1, x.nbytes // x.shape[0]))
    for start in range(0, x.shape[0], rows):
        count = min(rows, x.shape[0] - start)
        yield np.asarray(_rows(x, np.int32(start), count=count, everywhere=everywhere))


@partial(jax.jit, static_argnames="everywhere")
def _whole(xs: list[jax.Array], *, everywhere: NamedSharding) -> list[jax.Array]:
    return [lax.with_sharding_constraint(x, everywhere) for x in xs]


def each_to_host(xs: Sequence[Any]) -> Iterator[np.ndarray]:
    """`to_host` of many arrays of one mesh, in order; small ones share an exchange."""
    batch: list[Any] = []
    size = 0

    def read() -> Iterator[np.ndarray]:
        if batch:
            everywhere = NamedSharding(batch[0].sharding.mesh, PartitionSpec())
            yield from (np.asarray(x) for x in _whole(list(batch), everywhere=everywhere))
            batch.clear()

    for x in xs:
        small = isinstance(x, jax.Array) and not x.is_fully_addressable and isinstance(x.sharding, NamedSharding)
        small = small and x.nbytes <= _PART_BYTES
        if not small or size + x.nbytes > _PART_BYTES:
            yield from read()
            size = 0
        if small:
            batch.append(x)
            size += x.nbytes
        else:
            yield to_host(x)
    yield from read()


def to_host(x: Any) -> np.ndarray:
    """The whole array on the host, in every process."""
    parts = list(host_parts(x))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
