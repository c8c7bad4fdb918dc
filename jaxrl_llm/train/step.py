"""The jitted optimizer step, and the teacher-forced score that shares its forward pass.

Suffixes as in types.py; arrays of one microbatch are [B T].
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.config import ModelConfig
from jaxrl_llm.losses.logprobs import token_logprobs
from jaxrl_llm.losses.objectives import LOG_RATIO_LIMIT
from jaxrl_llm.models.transformer import abstract_params, forward, head_weight, logical_axes
from jaxrl_llm.sharding import check_divides, param_shardings, replicated, rows_sharding, spec
from jaxrl_llm.train.state import TrainState, abstract_state, as_float32, shardings_of
from jaxrl_llm.types import Params, TrainBatch, WeightedSum

Objective = Callable[
    [Float[Array, "B T"], Float[Array, "B T"], Float[Array, "B T"], Bool[Array, "B T"]], Float[Array, "B T"]
]
"""(logprobs, behavior_logprobs, advantages, mask) -> J, to be maximised; 0 where the mask is False."""

Metrics = dict[str, Float[Array, ""] | WeightedSum]

_ROW_FIELDS = (
    "tokens",
    "targets",
    "positions",
    "segment_ids",
    "token_weights",
    "advantages",
    "behavior_logprobs",
)


@flax.struct.dataclass
class _Totals:
    """What a microbatch adds to the metrics of its optimizer batch: sums, and two maxima. All float32 []."""

    loss: Array
    tokens: Array
    entropy: Array
    abs_log_ratio: Array
    ratio: Array
    squared_ratio: Array
    log_ratio_max: Array
    ratio_max: Array

    @classmethod
    def zero(cls) -> "_Totals":
        return cls(*[jnp.float32(0.0)] * 8)

    def merge(self, other: "_Totals") -> "_Totals":
        summed = jax.tree.map(jnp.add, self, other)
        return summed.replace(
            log_ratio_max=jnp.maximum(self.log_ratio_max, other.log_ratio_max),
            ratio_max=jnp.maximum(self.ratio_max, other.ratio_max),
        )

    def metrics(self) -> Metrics:
        return {
            "loss": self.loss,
            "tokens_trained": self.tokens,
            "entropy": WeightedSum(self.entropy, self.tokens),
            "log_ratio_mean_abs": WeightedSum(self.abs_log_ratio, self.tokens),
            "log_ratio_max": self.log_ratio_max,
            "ratio_mean": WeightedSum(self.ratio, self.tokens),
            "ratio_max": self.ratio_max,
            "ess": jnp.where(self.tokens > 0, self.ratio**2 / (self.squared_ratio * self.tokens), 1.0),
        }


def _score_rows(
    model: ModelConfig,
    params: Params,
    tokens_BT: Int[Array, "B T"],
    targets_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
    segment_ids_BT: Int[Array, "B T"],
    *,
    mesh: Mesh,
    temperature: float,
    head_chunk: int,
    remat: bool = False,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-probability of each target and entropy of its distribution, at the temperature, float32."""
    # The tables come together over fsdp, as FSDP means it; a lookup in a table of split width makes the partitioner
    # replicate the activations instead (it warns of "involuntary full rematerialization").
    table = NamedSharding(mesh, spec(("vocab", None)))
    tables = {name: params[name] for name in ("embed", "head") if name in params}
    params = params | lax.with_sharding_constraint(tables, table)
    hidden_BTD = forward(model, params, tokens_BT, positions_BT, segment_ids_BT, remat=remat)
    # Said outright: left to itself the partitioner may follow the embedding's shards and split the width instead.
    hidden_BTD = lax.with_sharding_constraint(hidden_BTD, NamedSharding(mesh, spec(("batch", None, None))))
    logprobs_N, entropy_N = token_logprobs(
        hidden_BTD.reshape(-1, model.d_model),
        head_weight(params),
        targets_BT.reshape(-1),
        temperature=temperature,
        chunk=head_chunk,
    )
    return logprobs_N.reshape(tokens_BT.shape), entropy_N.reshape(tokens_BT.shape)


def _totals(
    loss: Array,
    logprobs_BT: Float[Array, "B T"],
    entropy_BT: Float[Array, "B T"],
    behavior_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
) -> _Totals:
    log_ratio_BT = jnp.where(mask_BT, logprobs_BT - behavior_BT, 0.0)
    ratio_BT = jnp.where(mask_BT, jnp.exp(jnp.clip(log_ratio_BT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)), 0.0)
    return _Totals(
        loss=loss,
        tokens=jnp.sum(mask_BT, dtype=jnp.float32),
        entropy=jnp.sum(jnp.where(mask_BT, entropy_BT, 0.0)),
        abs_log_ratio=jnp.sum(jnp.abs(log_ratio_BT)),
        ratio=jnp.sum(ratio_BT),
        squared_ratio=jnp.sum(ratio_BT**2),
        log_ratio_max=jnp.max(jnp.abs(log_ratio_BT)),
        ratio_max=jnp.max(ratio_BT),
    )


@dataclass(frozen=True)
class TrainStep:
    """`step(state, batch) -> (state, metrics)`; see `make_train_step`.

    `jitted` is a jax.stages.Wrapped, for lowering and inspection, or a jax.stages.Compiled after `compiled`.
    """

    jitted: Any
    mesh: Mesh

    def compiled(self, state: TrainState, batch: TrainBatch) -> "TrainStep":
        """The step compiled for these shapes now (abstract values will do), so that no training step pays for it."""
        return replace(self, jitted=self.jitted.lower(state, batch).compile())

    def __call__(self, state: TrainState, batch: TrainBatch) -> tuple[TrainState, Metrics]:
        """Raises UserError before anything is compiled if the mesh does not divide the rows."""
        check_divides(self.mesh, (None, "batch", None), batch.tokens.shape, "train.microbatch_rows")
        return self.jitted(state, batch)


def make_train_step(
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    objective: Objective,
    *,
    mesh: Mesh,
    temperature: float,
    head_chunk: int,
    remat: bool,
) -> TrainStep:
    """One update on loss = -sum(token_weights * J), jitted once for any number of microbatches; the state is donated.

    Tokens are trained where their weight is not 0. The weights already hold the global denominators, so microbatches
    and devices only add up: gradients accumulate in float32, sharded like the parameters, over the first
    `batch.microbatches` of the M microbatches (never more than M). Rows split over the mesh axes data and fsdp.

    `state.step` always counts up. The weights and the optimizer's state stay bit-equal if nothing was trained, and if
    the loss or the gradient's norm is not finite (`skipped` is then 1).

    Metrics are float32 [] over the whole optimizer batch; means over trained tokens are kept as WeightedSum:
    loss, tokens_trained, entropy (mean, nats), log_ratio_mean_abs (mean) and log_ratio_max of |logp - behavior|,
    ratio_mean (mean) and ratio_max of exp(logp - behavior), its exponent clamped to +-20, ess (effective sample size
    of these ratios as a share of the tokens), grad_norm (before clipping), param_norm (after the update), update_norm,
    skipped.
    """
    abstract = abstract_state(model, optimizer, mesh=mesh)
    shardings = shardings_of(abstract)
    rows: Any = rows_sharding(mesh, leading=1)
    whole: Any = replicated(mesh)
    batch_shardings = TrainBatch(**dict.fromkeys(_ROW_FIELDS, rows), microbatches=whole)
    optimizer = optax.with_extra_args_support(optimizer)

    def microbatch_loss(params: Params, micro: dict[str, Array]) -> tuple[Array, _Totals]:
        logprobs_BT, entropy_BT = _score_rows(
            model,
            params,
            micro["tokens"],
            micro["targets"],
            micro["positions"],
            micro["segment_ids"],
            mesh=mesh,
            temperature=temperature,
            head_chunk=head_chunk,
            remat=remat,
        )
        weights_BT, behavior_BT = micro["token_weights"], micro["behavior_logprobs"]
        mask_BT = weights_BT != 0
        j_BT = objective(logprobs_BT, behavior_BT, micro["advantages"], mask_BT)
        loss = -jnp.sum(jnp.where(mask_BT, weights_BT * j_BT, 0.0))
        return loss, lax.stop_gradient(_totals(loss, logprobs_BT, entropy_BT, behavior_BT, mask_BT))

    def accumulated(params: Params, batch: TrainBatch) -> tuple[Params, _Totals]:
        fields = {name: getattr(batch, name) for name in _ROW_FIELDS}

        def add_microbatch(m, carry):
            gradient, totals = carry
            micro = {name: lax.dynamic_index_in_dim(x, m, keepdims=False) for name, x in fields.items()}
            part, part_totals = jax.grad(microbatch_loss, has_aux=True)(params, micro)
            gradient = jax.tree.map(lambda total, x: total + x.astype(jnp.float32), gradient, part)
            # Without this the gradients lose the fsdp axis and every device holds them whole.
            return lax.with_sharding_constraint(gradient, shardings.params), totals.merge(part_totals)

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
        start = (lax.with_sharding_constraint(zeros, shardings.params), _Totals.zero())
        return lax.fori_loop(0, batch.microbatches, add_microbatch, start)

    def train_step(state: TrainState, batch: TrainBatch) -> tuple[TrainState, Metrics]:
        gradient, totals = accumulated(state.params, batch)
        grad_norm = optax.tree.norm(gradient)
        finite = jnp.isfinite(totals.loss) & jnp.isfinite(grad_norm)
        apply = finite & (totals.tokens > 0)

        step = state.step + 1
        masters = as_float32(state.params)
        updates, opt_state = optimizer.update(gradient, state.opt_state, masters, step=step)
        updates = jax.tree.map(lambda u: jnp.where(apply, u, 0.0), updates)
        params = jax.tree.map(lambda p, p32, u: (p32 + u).astype(p.dtype), state.params, masters, updates)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(apply, new, old), (params, opt_state), (state.params, state.opt_state)
        )
        metrics = totals.metrics() | {
            "grad_norm": grad_norm,
            "param_norm": optax.tree.norm(as_float32(params)),
            "update_norm": optax.tree.norm(updates),
            "skipped": jnp.float32(~finite),
        }
        return TrainState(step=step, params=params, opt_state=opt_state), metrics

    jitted = jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(shardings, batch_shardings),
        out_shardings=(shardings, whole),
    )
    return TrainStep(jitted=jitted, mesh=mesh)


def make_score(
    model: ModelConfig, *, mesh: Mesh, temperature: float, head_chunk: int
) -> Callable[[Params, Array, Array, Array, Array], Float[Array, "B T"]]:
    """`score(params, tokens, targets, positions, segment_ids) -> logprobs`, all [B T], as the train step sees them.

    Raises UserError before anything is compiled if the mesh does not divide the rows.
    """
    rows = rows_sharding(mesh)

    def logprobs(params, tokens_BT, targets_BT, positions_BT, segment_ids_BT):
        return _score_rows(
            model,
            params,
            tokens_BT,
            targets_BT,
            positions_BT,
            segment_ids_BT,
            mesh=mesh,
            temperature=temperature,
            head_chunk=head_chunk,
        )[0]

    placed = param_shardings(mesh, logical_axes(model), abstract_params(model))
    jitted = jax.jit(logprobs, in_shardings=(placed, rows, rows, rows, rows), out_shardings=rows)

    def score(params, tokens_BT, targets_BT, positions_BT, segment_ids_BT):
        check_divides(mesh, ("batch", None), tokens_BT.shape, "rows to score")
        return jitted(params, tokens_BT, targets_BT, positions_BT, segment_ids_BT)

    return score
