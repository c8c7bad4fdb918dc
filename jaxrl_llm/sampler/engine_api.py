"""A stand-in for JetStream's engine interface, for environments without google-jetstream.

Same names, same abstract methods, same result layout, so that `PolicyEngine` is one class on either base. Which one
is in use is decided in `sampler/jetstream.py`.
"""

import abc
import dataclasses
import types
from typing import Any

import flax.struct
import jax
import numpy as np


@flax.struct.dataclass
class SlotData:
    """What one slot produced: `tokens` and `valid` are [samples, steps], `lengths` is [samples]."""

    tokens: Any
    valid: Any
    lengths: Any


@flax.struct.dataclass
class ResultTokens(abc.ABC):
    """Everything a dispatch produced in one int32 array, so that one copy brings it to the host.

    The `*_idx` pairs are half-open column ranges of `data`.
    """

    data: Any
    tokens_idx: tuple[int, int] = flax.struct.field(pytree_node=False)
    valid_idx: tuple[int, int] = flax.struct.field(pytree_node=False)
    length_idx: tuple[int, int] = flax.struct.field(pytree_node=False)
    samples_per_slot: int = flax.struct.field(pytree_node=False)

    def copy_to_host_async(self) -> None:
        """Start the copy; `convert_to_numpy` waits for it."""
        if isinstance(self.data, jax.Array):
            self.data.copy_to_host_async()

    def convert_to_numpy(self) -> "ResultTokens":
        """The same result with `data` on the host."""
        return dataclasses.replace(self, data=np.asarray(self.data))

    def get_result_at_slot(self, slot: int) -> SlotData:
        """The columns of one slot."""
        rows = self.data[slot * self.samples_per_slot : (slot + 1) * self.samples_per_slot]
        tokens, valid, lengths = (rows[:, a:b] for a, b in (self.tokens_idx, self.valid_idx, self.length_idx))
        return SlotData(tokens=tokens, valid=valid, lengths=lengths[:, 0])


class Engine(abc.ABC):
    """The abstract methods of JetStream's Engine."""

    @abc.abstractmethod
    def prefill(self, *, params: Any, existing_prefix: Any = None, padded_tokens: Any, true_length: int) -> Any: ...

    @abc.abstractmethod
    def generate(self, params: Any, decode_state: Any) -> Any: ...

    @abc.abstractmethod
    def insert(self, prefix: Any, decode_state: Any, slot: int) -> Any: ...

    @abc.abstractmethod
    def load_params(self, *args: Any, **kwargs: Any) -> Any: ...

    @abc.abstractmethod
    def get_prefix_destination_sharding(self) -> Any: ...

    @abc.abstractmethod
    def get_tokenizer(self) -> Any: ...

    @abc.abstractmethod
    def init_decode_state(self, *args: Any, **kwargs: Any) -> Any: ...

    @property
    @abc.abstractmethod
    def max_concurrent_decodes(self) -> int: ...

    @property
    @abc.abstractmethod
    def samples_per_slot(self) -> int: ...

    @property
    @abc.abstractmethod
    def max_prefill_length(self) -> int: ...

    @property
    @abc.abstractmethod
    def mesh(self) -> Any: ...

    @property
    @abc.abstractmethod
    def colocated_cpus(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class TokenizerParameters:
    """Stands for the protobuf message of the same name."""

    path: str = ""
    extra_ids: int = 0


tokenizer_pb2 = types.SimpleNamespace(TokenizerParameters=TokenizerParameters)
