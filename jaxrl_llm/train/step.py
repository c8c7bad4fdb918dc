"""The jitted optimizer step, and the teacher-forced score that shares its forward pass.

Suffixes as in types.py: arrays of one microbatch are [B T], of one update [M B T], of K updates [K M B T].
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxrl_llm.config import LoraConfig, ModelConfig
from jaxrl_llm.global_arrays import place
from jaxrl_llm.losses import metrics
from jaxrl_llm.losses.entropy import adapt_alpha, applied_alpha
from jaxrl_llm.models.lora import attach, trainable
from jaxrl_llm.models.remat import Remat
from jaxrl_llm.models.row_attention import choose_attention
from jaxrl_llm.models.transformer import abstract_params, logical_axes
from jaxrl_llm.sharding import check_rows, param_shardings, replicated, rows_sharding
from jaxrl_llm.train.algorithm import AdaptiveEntropy, Algorithm
from jaxrl_llm.train.microbatch import (
    Scorer,
    finished,
    look_back,
    microbatch_loss,
    microbatch_seen,
    router_weights,
    with_credit,
)
from jaxrl_llm.train.norms import part_norms
from jaxrl_llm.train.spikes import SpikeRule, judge
from jaxrl_llm.train.state import CriticState, EntropyControl, TrainState, abstract_state, as_float32, shardings_of
from jaxrl_llm.types import Params, Reach, TrainBatch, WeightedSum

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
_CREDIT_FIELDS = ("scores", "completions")


@dataclass(frozen=True)
class TrainStep:
    """`step(state, batch) -> (state, metrics)`; see `make_train_step`.

    `jitted` is a jax.stages.Wrapped, for lowering and inspection, or a jax.stages.Compiled after `compiled`.
    """

    jitted: Any
    mesh: Mesh
    batch_shardings: TrainBatch
    reference: Params | None = None
    base: Params | None = None

    def compiled(self, state: TrainState, batch: TrainBatch) -> "TrainStep":
        """The step compiled for these shapes now (abstract values will do), so that no training step pays for it."""
        return replace(self, jitted=self.lower(state, batch).compile())

    def lower(self, state: TrainState, batch: TrainBatch) -> jax.stages.Lowered:
        """The step lowered for these shapes; with abstract values (`reference` and `base` too) its devices need not be
        here."""
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
        return self.jitted.lower(state, batch, self.reference, self.base)

    def __call__(self, state: TrainState, batch: TrainBatch) -> tuple[TrainState, Metrics]:
        """On a mesh of several processes each gives the same batch and keeps its own part of it.

        Raises UserError before anything is compiled if the mesh does not divide the rows or their length.
        """
        check_rows(self.mesh, batch.tokens.shape[-2:], "train.microbatch_rows", "train.row_length")
        if self.mesh.is_multi_process:
            batch = place(batch, self.batch_shardings)
        return self.jitted(state, batch, self.reference, self.base)


def _microbatch(fields: Mapping[str, Array], m: Array) -> dict[str, Array]:
    return {name: lax.dynamic_index_in_dim(x, m, keepdims=False) for name, x in fields.items()}


def _named(name: str, norms: Mapping[str, Array]) -> dict[str, Array]:
    return {name if part == "all" else f"{name}_{part}": norm for part, norm in norms.items()}


def _zeros(abstract: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)


def make_train_step(
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    algorithm: Algorithm,
    *,
    mesh: Mesh,
    temperature: float,
    remat: Remat,
    head_chunk: int | None = None,
    unroll: int = 1,
    share_prompts: bool = False,
    reach: Reach | None = None,
    gradient_dtype: Any = jnp.float32,
    spikes: SpikeRule | None = None,
    ema: float | None = None,
    reference: Params | None = None,
    lora: LoraConfig | None = None,
    base: Params | None = None,
) -> TrainStep:
    """`algorithm.updates` updates on the algorithm's loss, jitted once for any number of microbatches.

    The state is donated. Tokens are trained where their weight is not 0. The weights already hold the global
    denominators, so microbatches and devices only add up: gradients accumulate in `gradient_dtype`, sharded like the
    parameters, over the first `batch.microbatches` of the M microbatches (never more than M; of a single one the
    gradient is taken as it is). Rows split over the mesh axes data, fsdp and expert, tokens over context. Of
    several updates each has its part of the batch (axis K) and goes on from the weights that the one before left;
    old log-probabilities and values are those of the weights that began the step. `head_chunk` is how many tokens'
    logits exist at once, those of all devices together (None: as losses.chunks.default_chunk says). `share_prompts`
    says that batches may have `prefix_ids`, which not every attention takes; `reach` is how far their documents
    reach at most (RowShape.reach), which nothing here checks. `reference` is a frozen copy of what is trained,
    placed like it, that the algorithm's KL is taken to. With `lora` the adapters are trained, on `base`, the
    policy's frozen weights: read, never written or donated. With `ema` the state keeps an average of what is
    trained, ema * average + (1 - ema) * params after every update.

    `state.step` always counts up, once a step. What an update would change stays bit-equal if nothing was trained, and
    if the loss or the gradient's norm is not finite (`skipped` counts these), and with `spikes` if that norm is a spike
    (`skipped_spikes`; only the number of spikes in a row is then counted up in `state.norms`).

    Metrics are float32 [] over the whole step; means over trained tokens are kept as WeightedSum:
    loss, tokens_trained, entropy (mean, nats), log_ratio_mean_abs (mean) and log_ratio_max of |logp - behavior|,
    ratio_mean (mean) and ratio_max of exp(logp - behavior), its exponent clamped to +-20, ess (effective sample size
    of these ratios as a share of the tokens), kl_sampler_k1 and _k3, clip_low, clip_high and clip_dual (the
    objective's, see losses/metrics.py), grad_norm (the policy's, before clipping), param_norm (of what is trained,
    after the step), update_norm, skipped. Loss and norms are means over the updates that trained anything; each of the
    three norms also comes as NORM_PART for the parts of train/norms.py. With `spikes`: skipped_spikes and
    grad_norm_usual, the mean that the next norm is compared with.
    Where the algorithm has them: old_ratio_mean, old_ratio_max and old_ess of exp(logp - old), kl_reference_k1 and
    _k3, importance_mean (what corrections multiply by) and importance_zero (share of tokens they drop),
    entropy_coefficient, value_loss, value_mean, return_mean; router_balance and router_z (means over all tokens).
    """
    critic, bonus = algorithm.critic, algorithm.entropy
    adaptive = bonus if isinstance(bonus, AdaptiveEntropy) else None
    abstract = abstract_state(
        model,
        optimizer,
        mesh=mesh,
        critic=critic.optimizer if critic is not None else None,
        adapts_entropy=adaptive is not None,
        watches_norms=spikes is not None,
        averages=ema is not None,
        lora=lora,
    )
    shardings = shardings_of(abstract)
    trained_shardings = (shardings.params, shardings.critic.head if critic is not None else None)
    rows: Any = rows_sharding(mesh, leading=2 if algorithm.updates > 1 else 1)
    whole: Any = replicated(mesh)
    names = _ROW_FIELDS + (_CREDIT_FIELDS if algorithm.credit is not None else ())
    placed = dict.fromkeys((*_ROW_FIELDS, *_CREDIT_FIELDS, "prefix_ids"), rows)
    batch_shardings = TrainBatch(**placed, microbatches=whole)
    attention = choose_attention(model, mesh, share_prompts=share_prompts, reach=reach)
    scorer = Scorer(model, mesh, temperature, head_chunk, remat, unroll, attention)
    unsaved = replace(scorer, remat="none")  # what is never differentiated saves no activations anyway
    optimizer = optax.with_extra_args_support(optimizer)
    head_optimizer = optax.with_extra_args_support(critic.optimizer) if critic is not None else None

    def looked_back(state: TrainState, frozen: Params | None, base: Params | None, fields: dict, count: Array):
        """The fields of one update, [M B T], with what the weights of `state` and the reference say about them."""
        head = state.critic.head if state.critic is not None else None
        policy = attach(base, state.params, lora)
        compared = attach(base, frozen, lora) if frozen is not None else None

        def seen(m):
            return look_back(unsaved, algorithm, policy, head, compared, _microbatch(fields, m))

        def add_microbatch(m, found):
            return {name: found[name].at[m].set(x) for name, x in seen(m).items()}

        wanted = jax.eval_shape(seen, 0)
        if not wanted:
            return fields
        zeros = jnp.zeros(fields["tokens"].shape, jnp.float32)
        nothing = lax.with_sharding_constraint(zeros, rows_sharding(mesh, leading=1))
        return fields | lax.fori_loop(0, count, add_microbatch, dict.fromkeys(wanted, nothing))

    def accumulated(trained: tuple[Params, Params | None], base: Params | None, fields: dict, count: Array, alpha: Any):
        """(gradient, loss, metrics) over the first `count` microbatches of one update."""

        def policy(trained):
            return attach(base, trained[0], lora), trained[1]

        def added(total, more):
            total = jax.tree.map(
                lambda old, x: (old.astype(jnp.float32) + x.astype(jnp.float32)).astype(old.dtype), total, more
            )
            # Without this the gradients lose the fsdp axis and every device holds them whole.
            return lax.with_sharding_constraint(total, trained_shardings)

        def through(m):
            """((loss, metrics), gradients of the heads and of what they see, the layers' as a function of these)."""
            micro = _microbatch(fields, m)
            seen, pull = jax.vjp(lambda trained: microbatch_seen(policy(trained)[0], scorer, algorithm, micro), trained)

            def loss_of(seen, trained):
                return microbatch_loss(seen, policy(trained), scorer, algorithm, micro, alpha)

            found, (d_seen, of_heads) = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)(seen, trained)
            return found, of_heads, d_seen, lambda d_seen: pull(d_seen)[0]

        def add_microbatch(m, carry):
            gradient, loss, found = carry
            (part_loss, part_found), of_heads, d_seen, through_layers = through(m)

            # The heads' gradient is added first and the way back through the layers is a branch, so that this needs its
            # memory when the head is done with its own: XLA on CPU drops barriers before it decides what runs when.
            gradient = lax.cond(
                jnp.any(fields["segment_ids"][m] != 0),
                lambda gradient, d_seen: added(gradient, through_layers(d_seen)),
                lambda gradient, d_seen: gradient,
                added(gradient, of_heads),
                d_seen,
            )
            return gradient, loss + part_loss, metrics.add(found, part_found)

        if len(fields["tokens"]) == 1:
            # Its gradient is the whole one: no second copy to add it to. Nothing counts where there is none.
            fields = fields | {"token_weights": jnp.where(count > 0, fields["token_weights"], 0.0)}
            (loss, found), of_heads, d_seen, through_layers = through(0)
            return added(of_heads, through_layers(d_seen)), loss, found
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, gradient_dtype), trained)
        nothing = _zeros(jax.eval_shape(lambda m: through(m)[0][1], 0))
        start = (lax.with_sharding_constraint(zeros, trained_shardings), jnp.float32(0.0), nothing)
        return lax.fori_loop(0, count, add_microbatch, start)

    def updated(state: TrainState, base: Params | None, fields: dict[str, Array], count: Array):
        """One update: (state, its metrics, numbers that add up over updates)."""
        alpha = bonus if bonus != 0.0 else None
        if state.entropy is not None and adaptive is not None:
            alpha = applied_alpha(state.entropy.coefficient, state.entropy.entropy, target=adaptive.target)
        trained = (state.params, state.critic.head if state.critic is not None else None)
        fields = with_credit(algorithm, fields, mesh)
        if algorithm.router is not None:
            fields["router_weights"] = router_weights(fields["segment_ids"], count)
        gradient, loss, found = accumulated(trained, base, fields, count, alpha)
        # The barrier keeps the squares of norms and of the optimizer's second moments apart: were they shared, XLA on
        # CPU would write them down, one more array of every parameter's size.
        norms, gradient = lax.optimization_barrier((part_norms(gradient[0]), gradient))
        tokens = found["entropy"].weight
        finite = (
            jnp.isfinite(loss) & jnp.isfinite(norms["all"]) & jnp.isfinite(optax.tree.norm(as_float32(gradient[1])))
        )
        apply = finite & (tokens > 0)
        sums = {"skipped": jnp.float32(~finite), "trained": jnp.float32(tokens > 0)}
        heard = refused = state.norms
        if state.norms is not None and spikes is not None:
            spike, heard, refused = judge(state.norms, norms["all"], spikes)
            spike &= apply
            refused = jax.tree.map(lambda new, old: jnp.where(spike, new, old), refused, state.norms)
            apply &= ~spike
            sums["skipped_spikes"] = jnp.float32(spike)

        def moved_by(state: TrainState, gradient: Params) -> tuple[Params, Any]:
            return optimizer.update(as_float32(gradient), state.opt_state, as_float32(state.params), step=state.step)

        updates, _ = moved_by(state, gradient[0])

        def changed(state: TrainState, gradient: Any, updates: Params) -> tuple[TrainState, dict[str, Array]]:
            _, opt_state = moved_by(state, gradient[0])
            params = jax.tree.map(lambda p, u: (p.astype(jnp.float32) + u).astype(p.dtype), state.params, updates)
            after = replace(state, params=params, opt_state=opt_state, norms=heard)
            if state.critic is not None and head_optimizer is not None:
                head = state.critic.head
                pull = as_float32(gradient[1])
                moves, head_state = head_optimizer.update(pull, state.critic.opt_state, head, step=state.step)
                after = replace(after, critic=CriticState(head=optax.apply_updates(head, moves), opt_state=head_state))
            if state.entropy is not None and adaptive is not None:
                mean = found["entropy"].total / jnp.maximum(tokens, 1.0)
                limits = {"target": adaptive.target, "step": adaptive.step, "high": adaptive.highest}
                moved = adapt_alpha(state.entropy.coefficient, mean, **limits)
                after = replace(after, entropy=EntropyControl(coefficient=moved, entropy=mean))
            if state.ema is not None and ema is not None:
                average = jax.tree.map(lambda a, p: a + (1.0 - ema) * (p - a), state.ema, as_float32(params))
                after = replace(after, ema=average)
            return after, part_norms(updates)

        def kept(state: TrainState, gradient: Any, updates: Params) -> tuple[TrainState, dict[str, Array]]:
            return replace(state, norms=refused), _zeros(jax.eval_shape(part_norms, updates))

        # A branch that only replaces the old state does so in place; where it is also read to find `updates`, XLA makes
        # a copy of all of it first, which lives through the whole step.
        after, moved_norms = lax.cond(apply, changed, kept, state, gradient, updates)
        sums |= {"loss": loss} | _named("grad_norm", norms) | _named("update_norm", moved_norms)
        return after, found, sums

    def train_step(
        state: TrainState, batch: TrainBatch, frozen: Params | None, base: Params | None
    ) -> tuple[TrainState, Metrics]:
        fields = {name: getattr(batch, name) for name in names}
        if batch.prefix_ids is not None:
            fields["prefix_ids"] = batch.prefix_ids
        state = replace(state, step=state.step + 1)
        if algorithm.updates == 1:
            part = looked_back(state, frozen, base, fields, batch.microbatches)
            state, found, sums = updated(state, base, part, batch.microbatches)
        else:
            # All parts are looked at before the first update moves the weights.
            parts = lax.map(lambda part: looked_back(state, frozen, base, *part), (fields, batch.microbatches))

            def go_on(carry, part):
                state, found, sums = carry
                state, *more = updated(state, base, *part)
                return (state, metrics.add(found, more[0]), jax.tree.map(jnp.add, sums, more[1])), None

            first = jax.tree.map(lambda x: x[0], (parts, batch.microbatches))
            nothing = _zeros(jax.eval_shape(updated, state, base, *first)[1:])
            (state, found, sums), _ = lax.scan(go_on, (state, *nothing), (parts, batch.microbatches))
        counts = {name: sums.pop(name) for name in ("skipped", "skipped_spikes") if name in sums}
        trained = jnp.maximum(sums.pop("trained"), 1.0)
        means = {name: total / trained for name, total in sums.items()}
        param_norms = _named("param_norm", part_norms(state.params))
        if state.norms is not None:
            counts["grad_norm_usual"] = state.norms.mean
        return state, finished(found) | means | counts | param_norms | {"tokens_trained": found["entropy"].weight}

    jitted = jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(
            shardings,
            batch_shardings,
            shardings.params if reference is not None else None,
            _base_shardings(model, mesh, lora),
        ),
        out_shardings=(shardings, whole),
    )
    return TrainStep(jitted=jitted, mesh=mesh, batch_shardings=batch_shardings, reference=reference, base=base)


def _base_shardings(model: ModelConfig, mesh: Mesh, lora: LoraConfig | None) -> Any:
    return param_shardings(mesh, logical_axes(model), abstract_params(model)) if lora is not None else None


def make_score(
    model: ModelConfig,
    *,
    mesh: Mesh,
    temperature: float,
    head_chunk: int | None = None,
    lora: LoraConfig | None = None,
    base: Params | None = None,
) -> Callable[[Params, Array, Array, Array, Array], Float[Array, "B T"]]:
    """`score(params, tokens, targets, positions, segment_ids) -> logprobs`, all [B T], as the train step sees them.

    `params` are what is trained: with `lora` the adapters of `base`, which are not merged here.
    On a mesh of several processes each gives the same rows; the result is theirs together (global_arrays.to_host).
    Raises UserError before anything is compiled if the mesh does not divide the rows.
    """
    rows = rows_sharding(mesh)
    scorer = Scorer(model, mesh, temperature, head_chunk, attention=choose_attention(model, mesh))

    def logprobs(trained, base, tokens_BT, targets_BT, positions_BT, segment_ids_BT):
        params = attach(base, trained, lora)
        hidden_BTD = scorer.hidden(params, tokens_BT, positions_BT, segment_ids_BT)
        return scorer.logprobs(params, hidden_BTD, targets_BT)[0]

    trained, axes = trainable(model, lora)
    placed = param_shardings(mesh, axes, trained), _base_shardings(model, mesh, lora)
    jitted = jax.jit(logprobs, in_shardings=(*placed, rows, rows, rows, rows), out_shardings=rows)

    def score(params, tokens_BT, targets_BT, positions_BT, segment_ids_BT):
        check_rows(mesh, tokens_BT.shape, "rows to score", "tokens of a row to score")
        fields = (tokens_BT, targets_BT, positions_BT, segment_ids_BT)
        if mesh.is_multi_process:
            fields = place(fields, (rows,) * 4)
        return jitted(params, base, *fields)

    return score
