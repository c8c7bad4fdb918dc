"""One decoder with declared options (ModelConfig): parameters declared once in NNX, the rest pure functions of a tree.

Parameter tree (layers stacked on axis 0, matrices as input axes before output axes):

    embed [V D]   final_norm [D]   head [V D] (untied only)
    layers: attn_norm [L D]   q [L D H C]   k, v [L D K C]   o [L H C D]
            mlp_norm [L D]    gate, up [L D F]   down [L F D]
            with qkv_bias: q_bias [L H C]   k_bias, v_bias [L K C]
            with qk_norm: q_norm, k_norm [L C]   with post_norms: attn_post_norm, mlp_post_norm [L D]
            lora: {name: {a [L *in r], b [L r *out]}} where adapters are attached (see lora.py)
            with experts, instead of gate, up and down: what models/moe.py declares
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxrl_llm.config import ModelConfig
from jaxrl_llm.losses.router import balance_terms, z_terms
from jaxrl_llm.models import moe
from jaxrl_llm.models.attention import attend_cached, in_chunk, in_window
from jaxrl_llm.models.kv_cache import Cache, positions, read_layer, write_span, write_tokens
from jaxrl_llm.models.quantised import dequantise
from jaxrl_llm.models.remat import Remat, rematerialised
from jaxrl_llm.models.rope import Rotation, place, rotations
from jaxrl_llm.models.row_attention import XLA, RowAttention, Sight, row_attention
from jaxrl_llm.sharding import joined, parts, pieces
from jaxrl_llm.types import Params


def _param(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], *, fan_in: int, dtype: str) -> nnx.Param:
    # The logical axes travel in metadata of our own: NNX's `sharding_names` would shard eagerly.
    value = jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5
    return nnx.Param(value.astype(dtype), axes=axes)


def _norm_weight(config: ModelConfig, width: int) -> nnx.Param:
    start = jnp.zeros if config.unit_offset_norms else jnp.ones
    return nnx.Param(start((width,), config.param_dtype), axes=("norm",))


def _rms_norm(config: ModelConfig, x: Float[Array, "*b D"], weight: Float[Array, " D"]) -> Float[Array, "*b D"]:
    """Root-mean-square norm (arXiv:1910.07467) over the last axis, in float32; its scale is w, or 1 + w as declared."""
    x = x.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + config.norm_eps)
    scale = weight.astype(jnp.float32) + (1.0 if config.unit_offset_norms else 0.0)
    return (x * jnp.expand_dims(scale, range(x.ndim - 1))).astype(config.compute_dtype)


_ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}


class DecoderLayer(nnx.Module):
    """Pre-norm attention and gated feed-forward. Methods take any leading axes `*b` before the width.

    Inside they work on one flat axis of tokens: with more, XLA on CPU copies transposed activations for every weight's
    gradient, which doubled the training step of a small policy.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        D, H, K, C, F = config.d_model, config.heads, config.kv_heads, config.head_dim, config.d_ff
        param, norm = functools.partial(_param, rngs, dtype=config.param_dtype), functools.partial(_norm_weight, config)
        self.config = config
        self.attn_norm = norm(D)
        self.q = param((D, H, C), ("embed", "heads", "head_dim"), fan_in=D)
        self.k = param((D, K, C), ("embed", "kv_heads", "head_dim"), fan_in=D)
        self.v = param((D, K, C), ("embed", "kv_heads", "head_dim"), fan_in=D)
        self.o = param((H, C, D), ("heads", "head_dim", "embed"), fan_in=H * C * 2 * config.layers)
        self.mlp_norm = norm(D)
        if config.experts is None:
            self.gate = param((D, F), ("embed", "mlp"), fan_in=D)
            self.up = param((D, F), ("embed", "mlp"), fan_in=D)
            self.down = param((F, D), ("mlp", "embed"), fan_in=F * 2 * config.layers)
        else:
            for name, leaf in moe.declare(config, param).items():
                setattr(self, name, leaf)
        if config.qkv_bias:
            self.q_bias = nnx.Param(jnp.zeros((H, C), config.param_dtype), axes=("heads", "head_dim"))
            self.k_bias = nnx.Param(jnp.zeros((K, C), config.param_dtype), axes=("kv_heads", "head_dim"))
            self.v_bias = nnx.Param(jnp.zeros((K, C), config.param_dtype), axes=("kv_heads", "head_dim"))
        if config.qk_norm:
            self.q_norm, self.k_norm = norm(C), norm(C)
        if config.post_norms:
            self.attn_post_norm, self.mlp_post_norm = norm(D), norm(D)
        self.adapters: Params = nnx.data({})

    def _adapt(self, name: str, x_ND: Float[Array, "N I"], y: Float[Array, "N *o"]) -> Float[Array, "N *o"]:
        """`y`, what the matrix `name` made of `x_ND`, plus x A B where it has an adapter."""
        if name not in self.adapters:
            return y
        a, b = (self.adapters[name][part].astype(y.dtype) for part in "ab")
        return y + (x_ND @ a.reshape(-1, a.shape[-1]) @ b.reshape(len(b), -1)).reshape(y.shape)

    def qkv(self, x: Float[Array, "*b D"], rotation: Rotation) -> tuple[Array, Array, Array]:
        """Rotated queries [*b H C] and keys [*b K C], and values [*b K C]."""
        config, dtype = self.config, self.config.compute_dtype
        leading = x.shape[:-1]
        x = _rms_norm(config, x.reshape(-1, config.d_model), self.attn_norm[...])
        q, k, v = (jnp.einsum("nd,dhc->nhc", x, w[...].astype(dtype)) for w in (self.q, self.k, self.v))
        q, k, v = (self._adapt(name, x, y) for name, y in zip("qkv", (q, k, v), strict=True))
        if config.qkv_bias:
            biases = (self.q_bias, self.k_bias, self.v_bias)
            q, k, v = (y + b[...].astype(dtype)[None] for y, b in zip((q, k, v), biases, strict=True))
        if config.qk_norm:
            q, k = _rms_norm(config, q, self.q_norm[...]), _rms_norm(config, k, self.k_norm[...])
        q, k, v = (y.reshape(*leading, *y.shape[1:]) for y in (q, k, v))
        return *place(config, q, k, rotation), v

    def finish(
        self, x: Float[Array, "*b D"], attended: Float[Array, "*b H C"], mesh: Mesh | None
    ) -> tuple[Float[Array, "*b D"], moe.Routing | None]:
        """Output projection, residual, feed-forward, residual; and what the router said, if there is one."""
        config, dtype = self.config, self.config.compute_dtype
        shape = x.shape
        x = x.reshape(-1, config.d_model)
        # One matrix product of two axes: contracting heads and widths apart, XLA on CPU copies the weight every call.
        o_ND = self.o[...].astype(dtype).reshape(-1, config.d_model)
        attended = attended.reshape(len(x), -1)
        y = self._adapt("o", attended, attended @ o_ND)
        x = x + (_rms_norm(config, y, self.attn_post_norm[...]) if config.post_norms else y)
        y, routing = _rms_norm(config, x, self.mlp_norm[...]), None
        activation = _ACTIVATIONS[config.activation]
        if config.experts is None:
            gate = self._adapt("gate", y, y @ self.gate[...].astype(dtype))
            y = activation(gate) * self._adapt("up", y, y @ self.up[...].astype(dtype))
            y = self._adapt("down", y, y @ self.down[...].astype(dtype))
        else:
            weights = {name: getattr(self, name)[...] for name in moe.AXES if hasattr(self, name)}
            y, routing = moe.feed_forward(config, weights, y, activation, mesh)
        return (x + (_rms_norm(config, y, self.mlp_post_norm[...]) if config.post_norms else y)).reshape(shape), routing


class Transformer(nnx.Module):
    """Declares the parameter tree; see the module's docstring."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        V, D = config.vocab_size, config.d_model
        embedding = functools.partial(_param, rngs, (V, D), ("vocab", "embed"), fan_in=D, dtype=config.param_dtype)
        self.embed = embedding()
        self.layers = nnx.vmap(
            lambda layer_rngs: DecoderLayer(config, rngs=layer_rngs), in_axes=0, out_axes=0, axis_size=config.layers
        )(rngs.split(config.layers))
        self.final_norm = _norm_weight(config, D)
        if not config.tie_embeddings:
            self.head = embedding()


def _build(config: ModelConfig, seed: Any) -> nnx.State:
    return nnx.state(Transformer(config, rngs=nnx.Rngs(params=seed)), nnx.Param)


def init_params(config: ModelConfig, seed: int, shardings: Params | None = None) -> Params:
    """Random parameters, created where `shardings` (a tree like the parameters') puts them."""

    def build(key):
        return nnx.to_pure_dict(_build(config, key))

    return jax.jit(build, out_shardings=shardings)(jax.random.key(seed))


def abstract_params(config: ModelConfig) -> Params:
    """The parameter tree as `jax.ShapeDtypeStruct`s, nothing allocated."""
    return jax.eval_shape(lambda key: nnx.to_pure_dict(_build(config, key)), jax.random.key(0))


def logical_axes(config: ModelConfig) -> Params:
    """The parameter tree with each leaf replaced by the names of its axes (see sharding.py for where they live)."""
    state = nnx.eval_shape(lambda: _build(config, jax.random.key(0)))
    axes: dict = {}
    for path, variable in nnx.to_flat_state(state):
        names = variable.get_metadata()["axes"]
        *parents, leaf = path
        node = axes
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = ("layers", *names) if "layers" in path else names
    return axes


def _layer(config: ModelConfig, layer_params: Params) -> DecoderLayer:
    """One layer's module around the arrays of one slice of the stacked parameters."""
    graph, state = nnx.split(nnx.eval_shape(lambda: DecoderLayer(config, rngs=nnx.Rngs(0))))
    weights = {name: leaf for name, leaf in layer_params.items() if name != "lora"}
    nnx.replace_by_pure_dict(state, dequantise(weights, config.compute_dtype))
    layer = nnx.merge(graph, state)
    layer.adapters = nnx.data(layer_params.get("lora", {}))
    return layer


def head_weight(params: Params) -> Float[Array, "V D"]:
    """The output head; the embedding itself when the two are tied."""
    return params["head"] if "head" in params else params["embed"]


def _embed(config: ModelConfig, params: Params, tokens: Int[Array, "*b"]) -> Float[Array, "*b D"]:
    x = params["embed"][tokens].astype(config.compute_dtype)
    # The factor is rounded to the activations' dtype first, as the published weights were trained (55.5 for 3072).
    return x * jnp.asarray(config.d_model**0.5, x.dtype) if config.scale_embeddings else x


def _final(config: ModelConfig, params: Params, x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
    return _rms_norm(config, x, params["final_norm"])


def _kinds(config: ModelConfig) -> tuple[list[str], list[int]]:
    """The kinds of layers that there are, and which of them each layer is; see `ModelConfig.attention_pattern`."""
    pattern = config.attention_pattern
    kinds = sorted(set(pattern))
    return kinds, [kinds.index(pattern[layer % len(pattern)]) for layer in range(config.layers)]


def _pick(kind: Any, by_kind: dict[str, Any]) -> Any:
    """The mask or rotation of a layer, whose kind is the `kind`-th of `by_kind` (traced inside a scan)."""
    picked, *others = choices = [by_kind[name] for name in sorted(by_kind)]
    if isinstance(kind, int):
        return choices[kind]
    for index, other in enumerate(others, 1):
        picked = jax.tree.map(lambda a, b, i=index: a if a is b else jnp.where(kind == i, b, a), picked, other)
    return picked


def _masks(config: ModelConfig, mask: Array, query_positions: Array, key_positions: Array) -> dict[str, Array]:
    """What each kind of layer may look at of what `mask` allows."""
    kinds, _ = _kinds(config)
    found = dict.fromkeys(kinds, mask)
    if config.window is not None:
        found["L"] = mask & in_window(query_positions, key_positions, config.window)
    if config.attention_chunk is not None:
        found["C"] = mask & in_chunk(query_positions, key_positions, config.attention_chunk)
    return found


def _over_layers(config: ModelConfig, body, carry, layers: Params, unroll: int = 1):
    """`lax.scan` over stacked layers, or a plain loop over a tuple of one tree per layer, without the scan's second
    result.

    `body` is given the layer's weights, its index and its kind. The loop's compilation grows with depth, but
    no step copies a layer's weights out of the stack. XLA does so on CPU, where with few rows that copy costs a third
    of a decode step. In the scan `unroll` layers make one turn.
    """
    _, kinds = _kinds(config)
    if not isinstance(layers, tuple):
        scanned = (layers, jnp.arange(config.layers), jnp.asarray(kinds))
        return jax.lax.scan(body, carry, scanned, unroll=min(unroll, config.layers))
    for index, layer_params in enumerate(layers):
        carry, _ = body(carry, (layer_params, index, kinds[index]))
    return carry, None


def _attention(config: ModelConfig) -> dict[str, Any]:
    """The constants of the scores."""
    return {"scale": (config.query_pre_attn_scalar or config.head_dim) ** -0.5, "softcap": config.attention_softcap}


def forward(
    config: ModelConfig,
    params: Params,
    tokens_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
    segment_ids_BT: Int[Array, "B T"],
    prefix_ids_BT: Int[Array, "B T"] | None = None,
    *,
    remat: Remat = "none",
    unroll: int = 1,
    attention: RowAttention = XLA,
    mesh: Mesh | None = None,
) -> Float[Array, "B T D"]:
    """Final hidden states of packed (or padded) rows; the head is applied by whoever needs logits.

    `prefix_ids` as in TrainBatch: the segment of a prompt that a token's document shares with others of its row.
    `mesh` is where the arrays live, if they are split; experts need it, and tokens split over `context`. `unroll`
    layers are compiled as one turn of the scan over stacked layers.
    """
    rows = (tokens_BT, positions_BT, segment_ids_BT, prefix_ids_BT)
    return _forward(config, params, *rows, remat=remat, unroll=unroll, attention=attention, mesh=mesh)[0]


class RouterTerms(NamedTuple):
    """The losses of the routers, token by token and averaged over layers; see losses/router.py."""

    balance: Array  # [B T]
    z: Array  # [B T]


def forward_routed(
    config: ModelConfig,
    params: Params,
    tokens_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
    segment_ids_BT: Int[Array, "B T"],
    prefix_ids_BT: Int[Array, "B T"] | None = None,
    *,
    remat: Remat = "none",
    unroll: int = 1,
    attention: RowAttention = XLA,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "B T D"], RouterTerms]:
    """`forward` of a model with experts and stacked layers, and what its routers' losses are made of."""

    def terms(routing):
        pieces_shape = pieces(mesh, segment_ids_BT).shape
        logits_BTE, chosen_BTK = (joined(mesh, y.reshape(*pieces_shape, -1)) for y in (routing.logits, routing.chosen))
        return RouterTerms(balance_terms(logits_BTE, chosen_BTK, segment_ids_BT), z_terms(logits_BTE))

    rows = (tokens_BT, positions_BT, segment_ids_BT, prefix_ids_BT)
    hidden_BTD, layers = _forward(
        config, params, *rows, remat=remat, unroll=unroll, attention=attention, mesh=mesh, said=terms
    )
    return hidden_BTD, jax.tree.map(lambda x_LBT: jnp.mean(x_LBT, axis=0), layers)


def _forward(
    config, params, tokens_BT, positions_BT, segment_ids_BT, prefix_ids_BT, *, remat, unroll, attention, mesh, said=None
) -> tuple[Array, Any]:
    """Hidden states, and `said(routing)` of every layer (for stacked layers).

    Between embedding and final norm x is [P t D]: the pieces of rows that devices along `context` hold. Only attention
    looks beyond a piece.
    """
    assert parts(mesh, "time") == parts(attention.mesh, "time")
    kinds, _ = _kinds(config)
    narrower = {"L": {"window": config.window}, "C": {"chunk": config.attention_chunk}}
    everywhere = Sight(segment_ids_BT, positions_BT, prefix_ids_BT=prefix_ids_BT)
    sights = [everywhere._replace(**narrower.get(kind, {})) for kind in kinds]
    attend = row_attention(attention, sights, **_attention(config))
    by_kind = rotations(config, pieces(mesh, positions_BT))

    def body(x, scanned):
        layer_params, _, kind = scanned
        layer = _layer(config, layer_params)
        q, k, v = layer.qkv(x, _pick(kind, by_kind))
        attended = attend(q, k, v, kind)
        x, routing = layer.finish(x, attended, mesh)
        return x, said(routing) if said is not None else None

    body = rematerialised(body, remat)
    start = _embed(config, params, pieces(mesh, tokens_BT))
    x, found = _over_layers(config, body, start, params["layers"], unroll)
    return joined(mesh, _final(config, params, x)), found


def slot_rotations(config: ModelConfig, positions_S: Int[Array, " S"]) -> dict[str, Rotation]:
    """The rotations, by kind of layer, of one token per slot at these positions."""
    return rotations(config, positions_S[:, None])


def decode(
    config: ModelConfig,
    params: Params,
    tokens_S: Int[Array, " S"],
    positions_S: Int[Array, " S"],
    cache: Cache,
    *,
    by_kind: dict[str, Rotation] | None = None,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "S D"], Cache]:
    """One token per slot: writes its keys and values at `positions_S`, attends to positions 0..positions_S.

    `by_kind` is `slot_rotations` of these positions. A loop over decode steps should carry it from one to the next:
    what a loop carries is written down, where otherwise XLA on CPU works out every sine again in every layer.
    """

    def write(cache, index, k, v):
        return write_tokens(cache, index, positions_S, k[:, 0], v[:, 0])

    by_kind = slot_rotations(config, positions_S) if by_kind is None else by_kind
    rows = (tokens_S[:, None], positions_S[:, None], by_kind)
    hidden_S1D, cache = _cached(config, params, *rows, cache, write, mesh)
    return hidden_S1D[:, 0], cache


def extend(
    config: ModelConfig,
    params: Params,
    tokens_BT: Int[Array, "B T"],
    start: Int[Array, ""],
    cache: Cache,
    *,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "B T D"], Cache]:
    """T more tokens of every row, at positions start ... start + T - 1 of a cache that holds what came before.

    Rows shorter than that write keys nobody may read: positions beyond a row's length are for later tokens to fill.
    """
    positions_BT = start + jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.int32), tokens_BT.shape)

    def write(cache, index, k, v):
        return write_span(cache, index, start, k, v)

    return _cached(config, params, tokens_BT, positions_BT, rotations(config, positions_BT), cache, write, mesh)


def _cached(config, params, tokens_BT, positions_BT, by_kind, cache, write, mesh) -> tuple[Array, Cache]:
    cached_1N = jnp.arange(positions(cache))[None]
    masks = _masks(config, cached_1N[:, None] <= positions_BT[..., None], positions_BT, cached_1N)

    # The cache is carried and updated in place; as scanned inputs and outputs it would be copied whole every step.
    def body(carry, scanned):
        x, cache = carry
        layer_params, index, kind = scanned
        layer = _layer(config, layer_params)
        q, k, v = layer.qkv(x, _pick(kind, by_kind))
        cache = write(cache, index, k, v)
        attended = attend_cached(q, *read_layer(cache, index, x.dtype), _pick(kind, masks), **_attention(config))
        return (layer.finish(x, attended, mesh)[0], cache), None

    (x, cache), _ = _over_layers(config, body, (_embed(config, params, tokens_BT), cache), params["layers"])
    return _final(config, params, x), cache
