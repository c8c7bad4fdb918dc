"""Weights as a stream of messages: cut into chunks on one side, checked and put together on the other."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jaxrl_llm.config import ModelConfig
from jaxrl_llm.models.transformer import abstract_params
from jaxrl_llm.sampler.proto import rl_pb2
from jaxrl_llm.sampler.wire_form import LeafShape
from jaxrl_llm.types import Params, UserError
from jaxrl_llm.weights.snapshot import Leaf, Snapshot, digest_of, hashed, leaf_name

CHUNK_BYTES = 1 << 20
"""Of one message's data: well below gRPC's own limit of 4 MiB."""

_DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
_INT8 = {"int8": np.dtype(np.int8)}


def weights_chunks(params: Params, version: int) -> Iterator[rl_pb2.WeightsChunk]:
    """The messages of one UpdateWeights call; one leaf at a time is on the host."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    yield rl_pb2.WeightsChunk(header=rl_pb2.WeightsHeader(version=version, leaves=len(leaves)))
    for path, leaf in leaves:
        yield from _leaf_chunks(hashed(leaf_name(path), np.asarray(leaf)))


def snapshot_chunks(snapshot: Snapshot) -> Iterator[rl_pb2.WeightsChunk]:
    """The messages of one Pull call."""
    yield rl_pb2.WeightsChunk(header=rl_pb2.WeightsHeader(version=snapshot.version, leaves=len(snapshot.leaves)))
    for leaf in snapshot.leaves:
        yield from _leaf_chunks(leaf)


def _leaf_chunks(leaf: Leaf) -> Iterator[rl_pb2.WeightsChunk]:
    shape, raw = leaf.array.shape, leaf.raw
    yield rl_pb2.WeightsChunk(
        leaf=rl_pb2.LeafHeader(path=leaf.path, dtype=leaf.array.dtype.name, shape=shape, sha256=leaf.sha256)
    )
    for start in range(0, len(raw), CHUNK_BYTES):
        yield rl_pb2.WeightsChunk(data=bytes(raw[start : start + CHUNK_BYTES]))


class WeightsAssembly:
    """Puts the messages of one UpdateWeights or Pull call together, as they come.

    For a model's weights in any dtype, or for leaves of exactly these shapes and dtypes (`WireForm.shapes`). `add`
    raises UserError at the first message that does not fit: an unknown, repeated or mis-shaped leaf, bytes too many or
    too few, another sha256, numbers that are not finite. So no call holds more than the model's own size.
    """

    def __init__(self, wanted: ModelConfig | Mapping[str, LeafShape]):
        if isinstance(wanted, ModelConfig):
            shapes = jax.tree_util.tree_leaves_with_path(abstract_params(wanted))
            self._wanted = {leaf_name(path): tuple(leaf.shape) for path, leaf in shapes}
            self._dtypes = dict.fromkeys(self._wanted, _DTYPES)
        else:
            self._wanted = {name: shape for name, (shape, _) in wanted.items()}
            self._dtypes = {name: {dtype: (_DTYPES | _INT8)[dtype]} for name, (_, dtype) in wanted.items()}
        self._leaves: dict[str, Leaf] = {}
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

    def snapshot(self) -> Snapshot:
        """What came, once everything has. Raises UserError naming the first leaf that is missing."""
        self._end_leaf()
        if self._header is None:
            raise UserError("weights: the call has no header")
        if missing := sorted(self._wanted.keys() - self._leaves.keys()):
            raise UserError(f"weights lack the leaf {missing[0]} (and {len(missing) - 1} more) of this model")
        leaves = tuple(sorted(self._leaves.values(), key=lambda leaf: leaf.path))
        return Snapshot(self._header.version, leaves, digest_of(leaves))

    def finish(self) -> tuple[Params, int]:
        """(params, version) of a model, once everything came. Raises UserError as `snapshot` does."""
        snapshot = self.snapshot()
        params: dict[str, Any] = {}
        for leaf in snapshot.leaves:
            *parents, last = leaf.path.split(".")
            node = params
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = leaf.array
        return params, snapshot.version

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
        dtypes = self._dtypes[leaf.path]
        if leaf.dtype not in dtypes:
            raise UserError(f"weights leaf {leaf.path} is {leaf.dtype}; use one of: {', '.join(dtypes)}")
        size = int(np.prod(leaf.shape, dtype=np.int64)) * dtypes[leaf.dtype].itemsize
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
        array = self._buffer.view(self._dtypes[leaf.path][leaf.dtype]).reshape(leaf.shape)
        if not np.isfinite(array).all():
            raise UserError(f"weights leaf {leaf.path} holds numbers that are not finite")
        self._leaves[leaf.path], self._leaf = Leaf(leaf.path, array, leaf.sha256), None
