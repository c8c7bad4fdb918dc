"""Versions of the weights: handed over inside one process (`board`), named and digested (`snapshot`), sent
on to samplers in other processes by whoever has them (`publisher`, `fan_out`)."""

from jaxrl_llm.weights.board import WeightBoard
from jaxrl_llm.weights.snapshot import digest

__all__ = ["WeightBoard", "digest"]
