"""What happens to one microbatch inside the jitted step: the forward pass, the loss, and what is reported beside it.

Arrays are [B T]; `micro` maps the names of TrainBatch's row fields, and what was worked out from them, to arrays.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.config import ModelConfig
from jaxrl_llm.losses.chunks import default_chunk
from jaxrl_llm.losses.credit import Given
from jaxrl_llm.losses.entropy import entropy_bonus
from jaxrl_llm.losses.logprobs import token_logprobs
from jaxrl_llm.losses.metrics import Maximum, Metric, kl_metrics, masked_mean, ratio_metrics
from jaxrl_llm.losses.token_loss import LossOf, token_loss
from jaxrl_llm.losses.value import critic_values, value_loss
from jaxrl_llm.models.remat import Remat
from jaxrl_llm.models.row_attention import XLA, RowAttention
from jaxrl_llm.models.transformer import RouterTerms, forward, forward_routed, head_weight
from jaxrl_llm.sharding import joined, parts, pieces, spec, whole_rows_sharding
from jaxrl_llm.train.algorithm import Algorithm
from jaxrl_llm.types import Params


@dataclass(frozen=True)
class Scorer:
    """The policy's forward pass on a mesh, at a temperature."""

    model: ModelConfig
    mesh: Mesh
    temperature: float
    head_chunk: int | None = None
    remat: Remat = "none"
    unroll: int = 1
    attention: RowAttention = XLA

    def hidden(
        self,
        params: Params,
        tokens_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"],
        segment_ids_BT: Int[Array, "B T"],
        prefix_ids_BT: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        rows = (tokens_BT, positions_BT, segment_ids_BT, prefix_ids_BT)
        return self._split(forward(self.model, self._gathered(params), *rows, **self._how))

    def hidden_and_router(
        self,
        params: Params,
        tokens_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"],
        segment_ids_BT: Int[Array, "B T"],
        prefix_ids_BT: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], RouterTerms]:
        """`hidden`, and what the router's losses are made of."""
        rows = (tokens_BT, positions_BT, segment_ids_BT, prefix_ids_BT)
        hidden_BTD, terms = forward_routed(self.model, self._gathered(params), *rows, **self._how)
        return self._split(hidden_BTD), terms

    @property
    def _how(self) -> dict[str, Any]:
        return {"remat": self.remat, "unroll": self.unroll, "attention": self.attention, "mesh": self.mesh}

    def _split(self, hidden_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        # Said outright: left to itself the partitioner may follow the embedding's shards and split the width instead.
        return lax.with_sharding_constraint(hidden_BTD, NamedSharding(self.mesh, spec(("batch", "time", None))))

    def logprobs(
        self,
        params: Params,
        hidden_BTD: Float[Array, "B T D"],
        targets_BT: Int[Array, "B T"],
        wanted_BT: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
        """Log-probability of each target and entropy of its distribution, float32, in nats; 0 where not wanted."""
        # Flattened by pieces, so that each device has a contiguous block of the tokens, its own.
        hidden_PTD, targets_PT = pieces(self.mesh, hidden_BTD), pieces(self.mesh, targets_BT)
        outputs = token_logprobs(
            hidden_PTD.reshape(-1, self.model.d_model),
            head_weight(self._gathered(params)),
            targets_PT.reshape(-1),
            wanted_N=None if wanted_BT is None else pieces(self.mesh, wanted_BT).reshape(-1),
            **self._head,
        )
        logprobs_BT, entropy_BT = (joined(self.mesh, x_N.reshape(targets_PT.shape)) for x_N in outputs)
        return logprobs_BT, entropy_BT

    def loss(
        self,
        params: Params,
        hidden_BTD: Float[Array, "B T D"],
        targets_BT: Int[Array, "B T"],
        fields: Mapping[str, Array],
        loss_of: LossOf,
    ) -> tuple[Float[Array, ""], Float[Array, "B T"], Float[Array, "B T"]]:
        """The sum of `loss_of` over the tokens of the mask in `fields` ([B T], by name), then what `logprobs` gives."""
        hidden_PTD, targets_PT = pieces(self.mesh, hidden_BTD), pieces(self.mesh, targets_BT)
        flat = {name: pieces(self.mesh, x_BT).reshape(-1) for name, x_BT in fields.items()}
        loss, *outputs = token_loss(
            hidden_PTD.reshape(-1, self.model.d_model),
            head_weight(self._gathered(params)),
            targets_PT.reshape(-1),
            flat,
            loss_of,
            wanted_N=flat["mask"],
            **self._head,
        )
        logprobs_BT, entropy_BT = (joined(self.mesh, x_N.reshape(targets_PT.shape)) for x_N in outputs)
        return loss, logprobs_BT, entropy_BT

    @property
    def _head(self) -> dict[str, Any]:
        shards = parts(self.mesh, "pieces")
        usual = default_chunk(self.model.vocab_size, shards=shards, vocab_shards=parts(self.mesh, "vocab"))
        return {
            "temperature": self.temperature,
            "chunk": usual if self.head_chunk is None else self.head_chunk,
            "shards": shards,
            "dtype": self.model.head_dtype,
            "softcap": self.model.final_softcap,
        }

    def _gathered(self, params: Params) -> Params:
        # The tables come together over fsdp, as FSDP means it; a lookup in a table of split width makes the partitioner
        # replicate the activations instead (it warns of "involuntary full rematerialization").
        table = NamedSharding(self.mesh, spec(("vocab", None)))
        tables = {name: params[name] for name in ("embed", "head") if name in params}
        return params | lax.with_sharding_constraint(tables, table)


def _rows(micro: Mapping[str, Array]) -> tuple[Array, Array, Array, Array | None]:
    return micro["tokens"], micro["positions"], micro["segment_ids"], micro.get("prefix_ids")


def _hidden(scorer: Scorer, params: Params, micro: Mapping[str, Array]) -> Float[Array, "B T D"]:
    return scorer.hidden(params, *_rows(micro))


def router_weights(segment_ids_MBT: Int[Array, "M B T"], count: Int[Array, ""]) -> Float[Array, "M B T"]:
    """1 / N for each of the N tokens (padding is none) of the first `count` microbatches of an update."""
    used_M11 = (jnp.arange(len(segment_ids_MBT)) < count)[:, None, None]
    real_MBT = ((segment_ids_MBT != 0) & used_M11).astype(jnp.float32)
    return real_MBT / jnp.maximum(jnp.sum(real_MBT), 1.0)


def _values(head: Params, hidden_BTD: Float[Array, "B T D"]) -> Float[Array, "B T"]:
    return critic_values(hidden_BTD, head["weight"], head["bias"])


def look_back(
    scorer: Scorer,
    algorithm: Algorithm,
    params: Params,
    value_head: Params | None,
    reference: Params | None,
    micro: Mapping[str, Array],
) -> dict[str, Float[Array, "B T"]]:
    """What the weights that begin a step, and the reference policy, say about a microbatch; nothing if nobody asks.

    old_logprobs, old_values (with a critic), reference_logprobs (with a reference).
    """
    seen = {}
    trained_BT = micro["token_weights"] != 0
    if algorithm.looks_back:
        hidden_BTD = _hidden(scorer, params, micro)
        seen["old_logprobs"], _ = scorer.logprobs(params, hidden_BTD, micro["targets"], trained_BT)
        if value_head is not None:
            seen["old_values"] = _values(value_head, hidden_BTD)
    if reference is not None:
        hidden_BTD = _hidden(scorer, reference, micro)
        seen["reference_logprobs"], _ = scorer.logprobs(reference, hidden_BTD, micro["targets"], trained_BT)
    return seen


def with_credit(algorithm: Algorithm, fields: Mapping[str, Array], mesh: Mesh) -> dict[str, Array]:
    """One update's fields, [M B T], with advantages (and the critic's returns) worked out from what was looked back."""
    if algorithm.credit is None:
        return dict(fields)
    # Credit walks along a row token by token; were the row split, each of its steps would fetch a token from elsewhere.
    rows = lax.with_sharding_constraint(dict(fields), whole_rows_sharding(mesh, leading=1))
    mask = rows["token_weights"] != 0
    kl = values = jnp.zeros(mask.shape, jnp.float32)
    if algorithm.penalty is not None and algorithm.penalty.in_reward:
        kl = algorithm.penalty.estimator(rows["old_logprobs"], rows["reference_logprobs"], mask)
    if algorithm.critic is not None:
        values = rows["old_values"]
    given = Given(rows["scores"], kl, values, mask, rows["completions"], rows["segment_ids"])
    advantages, returns = algorithm.credit(given)
    found = {"advantages": advantages} | ({"returns": returns} if returns is not None else {})
    return dict(fields) | found


class Seen(NamedTuple):
    """What the layers make of a microbatch: final hidden states [B T D], and what the router's losses are made of."""

    hidden: Array
    router: RouterTerms | None


def microbatch_seen(params: Params, scorer: Scorer, algorithm: Algorithm, micro: Mapping[str, Array]) -> Seen:
    """The microbatch up to the heads."""
    if algorithm.router is None:
        return Seen(_hidden(scorer, params, micro), None)
    return Seen(*scorer.hidden_and_router(params, *_rows(micro)))


def microbatch_loss(
    seen: Seen,
    trained: tuple[Params, Params | None],
    scorer: Scorer,
    algorithm: Algorithm,
    micro: Mapping[str, Array],
    alpha: float | Float[Array, ""] | None,
) -> tuple[Float[Array, ""], dict[str, Metric]]:
    """The microbatch's part of the loss, and its metrics as open sums; see `make_train_step`.

    `seen` is `microbatch_seen` of the policy; `trained` is (policy, value head or None), of which only the heads are
    used here; `alpha` the entropy coefficient, None where there is no bonus.
    """
    params, value_head = trained
    router, (hidden_BTD, terms) = algorithm.router, seen
    mask_BT = micro["token_weights"] != 0
    fields = {name: micro[name] for name in _LOSS_FIELDS if name in micro} | {"mask": mask_BT}
    if alpha is not None:
        fields["entropy_coefficient"] = jnp.full(mask_BT.shape, alpha, jnp.float32)
    segments = {"segment_ids": micro["segment_ids"]}
    if algorithm.token_level:
        costs = functools.partial(_costs, algorithm)
        loss, logprobs_BT, entropy_BT = scorer.loss(params, hidden_BTD, micro["targets"], fields, costs)
    else:
        logprobs_BT, entropy_BT = scorer.logprobs(params, hidden_BTD, micro["targets"], mask_BT)
        loss = jnp.sum(_costs(algorithm, logprobs_BT, entropy_BT, fields | segments))
    arrays = _arrays(algorithm, logprobs_BT, fields | segments)
    found = dict(algorithm.metrics(*arrays)) if algorithm.metrics is not None else {}
    if algorithm.weight is not None:
        importance_BT = algorithm.weight(*arrays)
        found["importance_mean"] = masked_mean(importance_BT, mask_BT)
        found["importance_zero"] = masked_mean(importance_BT == 0, mask_BT)
    if "reference_logprobs" in fields:
        found |= kl_metrics(logprobs_BT, fields["reference_logprobs"], mask_BT, "kl_reference")
    if alpha is not None:
        found["entropy_coefficient"] = masked_mean(fields["entropy_coefficient"], mask_BT)
    if router is not None and terms is not None:
        loss += jnp.sum(micro["router_weights"] * (router.balance * terms.balance + router.z * terms.z))
        real_BT = micro["segment_ids"] != 0
        found |= {"router_balance": masked_mean(terms.balance, real_BT), "router_z": masked_mean(terms.z, real_BT)}
    if algorithm.critic is not None:
        values_BT = _values(value_head, hidden_BTD)
        error_BT = value_loss(values_BT, micro["old_values"], micro["returns"], mask_BT, clip=algorithm.critic.clip)
        loss += algorithm.critic.coefficient * jnp.sum(_weighted(micro["token_weights"], error_BT))
        found["value_loss"] = masked_mean(error_BT, mask_BT)
        found["value_mean"] = masked_mean(values_BT, mask_BT)
        found["return_mean"] = masked_mean(micro["returns"], mask_BT)
    if "old_logprobs" in fields:
        found |= ratio_metrics(logprobs_BT, fields["old_logprobs"], mask_BT, "old_ratio")
    found |= _towards_sampler(logprobs_BT, micro["behavior_logprobs"], mask_BT)
    found["entropy"] = masked_mean(entropy_BT, mask_BT)
    return loss, lax.stop_gradient(found)


def _weighted(weights: Float[Array, "*s"], x: Float[Array, "*s"]) -> Float[Array, "*s"]:
    return jnp.where(weights != 0, weights * x, 0.0)


_LOSS_FIELDS = ("token_weights", "behavior_logprobs", "advantages", "old_logprobs", "reference_logprobs")


def _arrays(algorithm: Algorithm, logprobs: Float[Array, "*s"], fields: Mapping[str, Array]) -> tuple[Any, ...]:
    """The arguments of the objective and of what is called like it; see losses/algorithms.py."""
    structured = algorithm.num_segments is not None and "segment_ids" in fields
    segments = (fields["segment_ids"], algorithm.num_segments) if structured else (None, None)
    others = (fields["behavior_logprobs"], fields.get("old_logprobs"), fields["advantages"], fields["mask"])
    return (logprobs, *others, *segments)


def _costs(
    algorithm: Algorithm, logprobs: Float[Array, "*s"], entropy: Float[Array, "*s"], fields: Mapping[str, Array]
) -> Float[Array, "*s"]:
    """What each token adds to the loss, the router's and the critic's parts left out."""
    arrays, mask = _arrays(algorithm, logprobs, fields), fields["mask"]
    j = algorithm.objective(*arrays)
    if algorithm.weight is not None:
        j *= algorithm.weight(*arrays)
    penalty = algorithm.penalty
    if penalty is not None and not penalty.in_reward and "reference_logprobs" in fields:
        j -= penalty.coefficient * penalty.estimator(logprobs, fields["reference_logprobs"], mask)
    if "entropy_coefficient" in fields:
        j += entropy_bonus(entropy, mask, fields["entropy_coefficient"])
    return -_weighted(fields["token_weights"], j)


def _towards_sampler(
    logprobs_BT: Float[Array, "B T"], behavior_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]
) -> dict[str, Metric]:
    distance_BT = jnp.where(mask_BT, jnp.abs(logprobs_BT - behavior_BT), 0.0)
    return {
        **ratio_metrics(logprobs_BT, behavior_BT, mask_BT),
        **kl_metrics(logprobs_BT, behavior_BT, mask_BT, "kl_sampler"),
        "log_ratio_mean_abs": masked_mean(distance_BT, mask_BT),
        "log_ratio_max": Maximum(jnp.max(distance_BT)),
    }


def finished(found: Mapping[str, Metric]) -> dict[str, Any]:
    """Metrics of a whole step for its record: means stay WeightedSums, maxima and effective sample sizes numbers."""
    result: dict[str, Any] = {}
    for name, metric in found.items():
        if isinstance(metric, Maximum):
            result[name] = metric.value
        elif f"{name}_squared" in found:
            squares = found[f"{name}_squared"].total
            ess = metric.total**2 / (squares * metric.weight)
            result[f"{name}_mean"] = metric
            result[name.replace("ratio", "ess")] = jnp.where(metric.weight > 0, ess, 1.0)
        elif not name.endswith("_squared"):
            result[name] = metric
    return result
