"""Mixture of experts: a router sends every token through some of a layer's feed-forward networks (arXiv:1701.06538).

Every token goes through all the experts it chose: there is no capacity, and none is dropped. Tokens are sorted by
expert and multiplied in groups (`jax.lax.ragged_dot`), which has static shapes whatever the router says.

Leaves of a layer, beside those of models/transformer.py (E experts):

    router [D E]   expert_gate, expert_up [E D F]   expert_down [E F D]
    with a shared expert: shared_gate, shared_up [D F]   shared_down [F D]

The mesh axis `expert` splits the experts, and rows too: outside this file it is one more axis of data parallelism.
Here each device gathers the rows of its `expert` group, puts them through the experts it holds, and the parts are added
up and scattered back. That is one all-gather and one reduce-scatter of the rows per layer, an all-reduce's traffic,
and a buffer as long as if all rows chose this device's experts; an exchange of only the rows each device needs would
need a capacity, or shapes that depend on the router.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxrl_llm.config import ModelConfig
from jaxrl_llm.sharding import RULES, parts, spec

AXES = {
    "router": ("embed", "router"),
    "expert_gate": ("experts", "embed", "mlp"),
    "expert_up": ("experts", "embed", "mlp"),
    "expert_down": ("experts", "mlp", "embed"),
    "shared_gate": ("embed", "mlp"),
    "shared_up": ("embed", "mlp"),
    "shared_down": ("mlp", "embed"),
}
_EXPERTS = ("expert_gate", "expert_up", "expert_down")


def declare(config: ModelConfig, param: Callable[..., nnx.Param]) -> dict[str, nnx.Param]:
    """The leaves of one layer; `param` makes one from its shape, its axes and its fan-in."""
    D, E, F, depth = config.d_model, config.experts, config.d_ff, 2 * config.layers
    shapes = {"router": (D, E), "expert_gate": (E, D, F), "expert_up": (E, D, F), "expert_down": (E, F, D)}
    if (S := config.shared_expert_d_ff) is not None:
        shapes |= {"shared_gate": (D, S), "shared_up": (D, S), "shared_down": (S, D)}

    def fan_in(name, shape):
        return shape[-2] * depth if name.endswith("down") else shape[-2]

    return {name: param(shape, AXES[name], fan_in=fan_in(name, shape)) for name, shape in shapes.items()}


class Routing(NamedTuple):
    """What the router says of N tokens: all logits, the k chosen experts, what weighs each; float32."""

    logits: Array  # [N E]
    chosen: Array  # int32 [N k], best first
    gates: Array  # [N k]


def route(config: ModelConfig, x_ND: Float[Array, "N D"], router_DE: Float[Array, "D E"]) -> Routing:
    """The experts of every token, all in float32: a rounded logit may choose another expert.

    `config.router_gate` weighs them: softmax over all experts (Qwen3-MoE without norm_topk_prob), softmax over the
    chosen, which is the same made to sum to 1 (Mixtral, arXiv:2401.04088), or each one's sigmoid (Llama 4).
    """
    logits_NE = jnp.einsum(
        "nd,de->ne", x_ND.astype(jnp.float32), router_DE.astype(jnp.float32), precision=lax.Precision.HIGHEST
    )
    best_NK, chosen_NK = lax.top_k(logits_NE, config.experts_per_token or 0)
    if config.router_gate == "softmax_chosen":
        gates_NK = jax.nn.softmax(best_NK, axis=-1)
    elif config.router_gate == "softmax":
        gates_NK = jnp.exp(best_NK - jax.nn.logsumexp(logits_NE, axis=-1, keepdims=True))
    else:
        gates_NK = jax.nn.sigmoid(best_NK)
    return Routing(logits_NE, chosen_NK, gates_NK)


def feed_forward(
    config: ModelConfig,
    weights: Mapping[str, Array],
    x_ND: Float[Array, "N D"],
    activation: Callable[[Array], Array],
    mesh: Mesh | None,
) -> tuple[Float[Array, "N D"], Routing]:
    """The layer's output and what its router said. `weights` are the leaves of one layer, of any float dtype.

    On a mesh, rows are split over its batch axes and `context` in equal parts (see `sharding.pieces`); rows of zeros
    make up what is missing.
    """
    dtype = x_ND.dtype
    routing = route(config, x_ND, weights["router"])
    experts = tuple(weights[name].astype(dtype) for name in _EXPERTS)
    how = {"activation": activation, "inputs": config.router_gate == "sigmoid_input"}
    if mesh is None or mesh.size == 1:
        y_ND = _through_experts(x_ND, routing.chosen, routing.gates, experts, 0, **how).astype(dtype)
    else:
        y_ND = _on_mesh(mesh, x_ND, routing, experts, how)
    if config.shared_expert_d_ff is not None:
        gate, up, down = (weights[f"shared_{name}"].astype(dtype) for name in ("gate", "up", "down"))
        y_ND += (activation(x_ND @ gate) * (x_ND @ up)) @ down
    return y_ND, routing


def _on_mesh(mesh: Mesh, x_ND: Array, routing: Routing, experts: tuple[Array, ...], how: Mapping[str, Any]) -> Array:
    count = len(x_ND)
    rows = [jnp.pad(x, ((0, -count % parts(mesh, "pieces")), (0, 0))) for x in (x_ND, routing.chosen, routing.gates)]

    def local(x_ND, chosen_NK, gates_NK, *experts):
        # Weights come together over fsdp, as FSDP means it; the feed-forward width stays split over tensor.
        experts = tuple(_gathered(w, name) for w, name in zip(experts, _EXPERTS, strict=True))
        x_ND, chosen_NK, gates_NK = (
            lax.all_gather(x, "expert", axis=0, tiled=True) for x in (x_ND, chosen_NK, gates_NK)
        )
        first = lax.axis_index("expert") * experts[0].shape[0]
        part_ND = _through_experts(x_ND, chosen_NK, gates_NK, experts, first, **how).astype(x_ND.dtype)
        return lax.psum_scatter(lax.psum(part_ND, "tensor"), "expert", scatter_dimension=0, tiled=True)

    by_rows = spec(("pieces", None))
    y_ND = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(by_rows, by_rows, by_rows, *(spec(AXES[name]) for name in _EXPERTS)),
        out_specs=by_rows,
    )(*rows, *experts)
    return y_ND[:count]


def _gathered(weight: Array, name: str) -> Array:
    return lax.all_gather(weight, RULES["embed"], axis=AXES[name].index("embed"), tiled=True)


def _through_experts(
    x_ND: Float[Array, "N D"],
    chosen_NK: Int[Array, "N K"],
    gates_NK: Float[Array, "N K"],
    experts: tuple[Array, ...],
    first: int | Int[Array, ""],
    *,
    activation: Callable[[Array], Array],
    inputs: bool,
) -> Float[Array, "N D"]:
    """The weighted sum of what the experts first, first + 1, ... make of the tokens that chose them; float32.

    `experts` are their gates and ups [E D F] and downs [E F D]. Gates weigh what goes in (`inputs`) or what comes out.
    """
    gate_EDF, up_EDF, down_EFD = experts
    E, (N, K) = len(gate_EDF), chosen_NK.shape
    expert_M = chosen_NK.reshape(-1) - first
    # What other devices' experts are chosen for stands behind the last group.
    expert_M = jnp.where((expert_M >= 0) & (expert_M < E), expert_M, E)
    order_M = jnp.argsort(expert_M)
    sizes_E = jnp.sum(expert_M[:, None] == jnp.arange(E)[None], axis=0, dtype=jnp.int32)
    mine_M1 = jnp.take(expert_M, order_M, unique_indices=True)[:, None] < E

    def grouped(rows, weight):
        return lax.ragged_dot(rows, weight, sizes_E)

    x_MD = jnp.repeat(x_ND, K, axis=0)
    if inputs:
        x_MD = (x_MD * gates_NK.reshape(-1, 1)).astype(x_ND.dtype)
    # Behind the groups a product may hold anything; masked on both ways, none of it is seen, nor its gradient.
    x_MD = jnp.where(mine_M1, jnp.take(x_MD, order_M, axis=0, unique_indices=True), 0)
    y_MD = grouped(activation(grouped(x_MD, gate_EDF)) * grouped(x_MD, up_EDF), down_EFD)
    y_MD = jnp.where(mine_M1, y_MD, 0).astype(jnp.float32)
    back_M = jnp.argsort(order_M)
    y_NKD = jnp.take(y_MD, back_M, axis=0, unique_indices=True).reshape(N, K, -1)
    return jnp.sum(y_NKD if inputs else y_NKD * gates_NK[..., None], axis=1)
