"""Weights as a stream of messages: cut into chunks on one side, checked and put together on the other."""

import hashlib
from collections.abc import Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jaxrl_llm.config import ModelConfig
from jaxrl_llm.models.transformer import abstract_params
from jaxrl_llm.sampler.proto import rl_pb2
from jaxrl_llm.types import Params, UserError

CHUNK_BYTES = 1 << 20
"""Of one message's data: well below gRPC's own limit of 4 MiB."""

_DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


def weights_chunks(params: Params, version: int) -> Iterator[rl_pb2.WeightsChunk]:
    """The messages of one UpdateWeights call; one leaf at a time is on the host."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    yield rl_pb2.WeightsChunk(header=rl_pb2.WeightsHeader(version=version, leaves=len(leaves)))
    for path, leaf in leaves:
        array = np.asarray(leaf, order="C")
        raw = array.reshape(-1).view(np.uint8).data
        name, digest = jax.tree_util.keystr(path, simple=True, separator="."), hashlib.sha256(raw).digest()
        yield rl_pb2.WeightsChunk(
            leaf=rl_pb2.LeafHeader(path=name, dtype=array.dtype.name, shape=array.shape, sha256=digest)
        )
        for start in range(0, len(raw), CHUNK_BYTES):
            yield rl_pb2.WeightsChunk(data=bytes(raw[start : start + CHUNK_BYTES]))


class WeightsAssembly:
    """Puts the messages of one UpdateWeights call together for a model, as they come.

    `add` raises UserError at the first message that does not fit: an unknown, repeated or mis-shaped leaf, bytes too
    many or too few, another sha256, numbers that are not finite. So no call holds more than the model's own size.
    """

    def __init__(self, model: ModelConfig):
        shapes = jax.tree_util.tree_leaves_with_path(abstract_params(model))
        self._wanted = {jax.tree_util.keystr(p, simple=True, separator="."): tuple(a.shape) for p, a in shapes}
        self._leaves: dict[str, np.ndarray] = {}
        self._header: rl_pb2.WeightsHeader | None = None
        self._leaf: rl_pb2.LeafHeader | None = None
        self._buffer = np.zeros(0, np.uint8)
        self._filled = 0

    def add(self, chunk: rl_pb2.WeightsChunk) -> None:
        match chunk.WhichOneof("part"):
            case "header":
                if self._header is not None:
                    raise UserError("weights: a second header in one call")
                self._header = chunk.header
            case "leaf":
                self._end_leaf()
                self._begin_leaf(chunk.leaf)
            case "data":
                self._fill(chunk.data)
            case _:
                raise UserError("weights: an empty message")

    def finish(self) -> tuple[Params, int]:
        """(params, version) once everything came. Raises UserError naming the first leaf that is missing."""
        self._end_leaf()
        if self._header is None:
            raise UserError("weights: the call has no header")
        if missing := sorted(self._wanted.keys() - self._leaves.keys()):
            raise UserError(f"weights lack the leaf {missing[0]} (and {len(missing) - 1} more) of this model")
        params: dict[str, Any] = {}
        for name, leaf in self._leaves.items():
            *parents, last = name.split(".")
            node = params
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = leaf
        return params, self._header.version

    def _begin_leaf(self, leaf: rl_pb2.LeafHeader) -> None:
        if self._header is None:
            raise UserError("weights: a leaf before the header")
        if leaf.path not in self._wanted:
            raise UserError(f"weights have a leaf {leaf.path} that this model has not")
        if leaf.path in self._leaves:
            raise UserError(f"weights have the leaf {leaf.path} twice")
        if tuple(leaf.shape) != self._wanted[leaf.path]:
            raise UserError(
                f"weights leaf {leaf.path} has shape {tuple(leaf.shape)}; this model needs {self._wanted[leaf.path]}"
            )
        if leaf.dtype not in _DTYPES:
            raise UserError(f"weights leaf {leaf.path} is {leaf.dtype}; use one of: {', '.join(_DTYPES)}")
        size = int(np.prod(leaf.shape, dtype=np.int64)) * _DTYPES[leaf.dtype].itemsize
        self._leaf, self._filled, self._buffer = leaf, 0, np.empty(size, np.uint8)

    def _fill(self, data: bytes) -> None:
        if self._leaf is None:
            raise UserError("weights: bytes before their leaf's header")
        end = self._filled + len(data)
        if end > len(self._buffer):
            raise UserError(f"weights leaf {self._leaf.path} has more bytes than its shape and dtype say")
        self._buffer[self._filled : end] = np.frombuffer(data, np.uint8)
        self._filled = end

    def _end_leaf(self) -> None:
        if (leaf := self._leaf) is None:
            return
        if self._filled != len(self._buffer):
            raise UserError(f"weights leaf {leaf.path} has {self._filled} of its {len(self._buffer)} bytes")
        if hashlib.sha256(self._buffer.data).digest() != leaf.sha256:
            raise UserError(
                f"weights leaf {leaf.path} arrived with another sha256 than it was sent with; send it again"
            )
        array = self._buffer.view(_DTYPES[leaf.dtype]).reshape(leaf.shape)
        if not np.isfinite(array).all():
            raise UserError(f"weights leaf {leaf.path} holds numbers that are not finite")
        self._leaves[leaf.path], self._leaf = array, None
