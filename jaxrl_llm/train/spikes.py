"""Updates whose gradient is far larger than usual, and the statistic that says what is usual."""

from dataclasses import dataclass, replace

import flax.struct
import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class SpikeRule:
    """An update is a spike if its gradient's norm exceeds `factor` times the usual norm.

    Usual is the mean norm of the applied updates: of all of them up to `memory`, from then on each new one weighs
    1 / memory. Until `warmup` updates were applied nothing is a spike. Spikes leave the mean alone. The `patience`-th
    in a row is no spike but how gradients are now: it is applied, and the mean and its warm-up start again with it.
    """

    factor: float
    warmup: int = 20
    memory: int = 50
    patience: int = 10


def spike_rule(factor: float | None) -> SpikeRule | None:
    """The rule of `optimizer.skip_norm_factor`."""
    return None if factor is None else SpikeRule(factor)


@flax.struct.dataclass
class NormRecord:
    """`mean` float32 [] of the norms of `applied` int32 [] updates; `refused` int32 [] spikes since the last one."""

    mean: jax.Array
    applied: jax.Array
    refused: jax.Array


def no_norms() -> NormRecord:
    """The record of a run that begins."""
    return NormRecord(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def judge(record: NormRecord, norm: jax.Array, rule: SpikeRule) -> tuple[jax.Array, NormRecord, NormRecord]:
    """(whether a gradient of this norm is a spike, bool []; the record if it was applied; the record if it was not).

    A norm of 0, where all advantages are, says nothing about the others and is not recorded.
    """
    far = (record.applied >= rule.warmup) & (norm > rule.factor * record.mean)
    changed = far & (record.refused + 1 >= rule.patience)
    applied = jnp.where(changed, 0, record.applied) + 1
    weight = 1.0 / jnp.minimum(applied, rule.memory).astype(jnp.float32)
    mean = jnp.where(changed, norm, record.mean + (norm - record.mean) * weight)
    zero = jnp.zeros_like(record.refused)
    after = NormRecord(mean.astype(jnp.float32), applied.astype(jnp.int32), zero)
    after = jax.tree.map(lambda new, old: jnp.where(norm > 0, new, old), after, record)
    return far & ~changed, after, replace(record, refused=record.refused + 1)
