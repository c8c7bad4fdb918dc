"""PolicyEngine: JetStream's Engine over the policy's own modules, with per-slot sampling and per-token versions.

Suffixes: S slots, P prompts of one prefill, T positions of a padded prompt, V vocabulary, D decode steps.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm import sharding
from jaxrl_llm.config import ModelConfig
from jaxrl_llm.losses.logprobs import HIGHEST, Precision, project_f32
from jaxrl_llm.models.kv_cache import KVCache, empty_cache
from jaxrl_llm.models.transformer import (
    abstract_params,
    decode,
    forward_with_kv,
    head_weight,
    logical_axes,
)
from jaxrl_llm.sampler.jetstream import Engine, ResultTokens, tokenizer_pb2
from jaxrl_llm.sampler.sampling import request_keys, sample, token_keys
from jaxrl_llm.types import Params, UserError

# Rows of one pass of the prefill loop are chosen so that a pass holds about this many tokens: enough for the matrix
# products to be worth their weights' trip through memory, few enough that a short batch pads little.
_PREFILL_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class SlotSampling:
    """How one slot samples; the defaults are greedy to the engine's limit (`max_new_tokens` None)."""

    max_new_tokens: int | None = None
    temperature: float = 0.0
    seed: int = 0
    stream: int = 0
    sibling: int = 0


@flax.struct.dataclass
class Prefix:
    """Prefilled prompts, a row each: keys and values [L P T K C], prompt lengths [P], next-token logits f32 [P V]."""

    k: Array
    v: Array
    lengths_P: Array
    logits_PV: Array
    version: Array  # int32 [], the weights that made it


@flax.struct.dataclass
class DecodeState:
    """The slots. `tokens_S` is the last sampled token of each slot, not yet in the cache; it sits at `positions_S`.

    `fresh_S` marks slots whose first token (sampled when they were inserted) no dispatch has reported yet; its
    log-probability and version wait beside it. An inactive slot is free or finished.
    """

    cache: KVCache
    tokens_S: Array  # int32
    positions_S: Array  # int32
    generated_S: Array  # int32
    limits_S: Array  # int32
    temperatures_S: Array  # float32
    keys_S: Array  # PRNG keys
    active_S: Array  # bool
    fresh_S: Array  # bool
    first_logprobs_S: Array  # float32
    first_versions_S: Array  # int32
    version: Array  # int32 [], of the weights the next dispatch samples with


@flax.struct.dataclass
class PolicyResultTokens(ResultTokens):
    """JetStream's result with more columns: log-probabilities (float32 bits), versions and whether the slot goes on.

    Tokens, validity, log-probabilities and versions each take `steps + 1` columns: one for the token sampled when the
    slot was inserted (valid in the first dispatch afterwards only), then one per decode step. JetStream's own index
    pairs leave that first column out, because to its callers it comes with `prefill`.
    """

    logprobs_idx: tuple[int, int] = flax.struct.field(pytree_node=False)
    versions_idx: tuple[int, int] = flax.struct.field(pytree_node=False)
    active_idx: tuple[int, int] = flax.struct.field(pytree_node=False)

    def convert_to_numpy(self) -> "PolicyResultTokens":
        return dataclasses.replace(self, data=np.asarray(self.data))

    @property
    def steps(self) -> int:
        """Decode steps a dispatch may take."""
        return self.tokens_idx[1] - self.tokens_idx[0]

    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Host views (tokens, valid, logprobs, versions: [S, steps + 1]; active: [S])."""
        data = np.asarray(self.data)
        (t0, t1), (v0, v1) = self.tokens_idx, self.valid_idx
        logprobs = data[:, slice(*self.logprobs_idx)].view(np.float32)
        versions = data[:, slice(*self.versions_idx)]
        active = data[:, self.active_idx[0]] != 0
        return data[:, t0 - 1 : t1], data[:, v0 - 1 : v1] != 0, logprobs, versions, active


def _result(data: Array | np.ndarray, steps: int) -> PolicyResultTokens:
    w = steps + 1
    return PolicyResultTokens(
        data=data,
        tokens_idx=(1, w),
        valid_idx=(w + 1, 2 * w),
        logprobs_idx=(2 * w, 3 * w),
        versions_idx=(3 * w, 4 * w),
        length_idx=(4 * w, 4 * w + 1),
        active_idx=(4 * w + 1, 4 * w + 2),
        samples_per_slot=1,
    )


# Columns of the table that tells `_insert` what enters which slot: one row per slot, then the order of writing.
_PRESENT, _SOURCE, _SEED, _STREAM, _SIBLING, _LIMIT, _TEMPERATURE, _ORDER = range(8)


class PolicyEngine(Engine):
    """Decodes up to `slots` sequences at once on `mesh`; JetStream's Engine API and the batched forms of it.

    Keyword arguments:
      mesh: from `sharding.make_mesh`; slots are split over `data`, heads, feed-forward and vocabulary over `tensor`.
      decode_steps: most decode steps of one `generate`; it stops earlier when no slot is active.
      max_prompt_tokens, max_new_tokens: a slot's cache holds their sum.
      eos_id: the token that ends a completion; it is the completion's last token.
      dtype: of the engine's copy of the weights and of the cache.
      head_precision: of the head's float32 product; the trainer must use the same.
      tokenizer_path: what `get_tokenizer` tells JetStream's server.
      unstack: keep each layer's weights in buffers of their own (a tuple of layers instead of a stack); by default
        on CPU only, where it is a third faster.

    Raises UserError if slots or heads do not divide over the mesh, if a prompt and its completion do not fit the
    model's context, or if `eos_id` is no token.

    The methods are pure functions of weights and decode state; a decode state that is passed in is donated. Nothing
    here knows requests or queues: that is the scheduler.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        mesh: Mesh,
        slots: int,
        decode_steps: int,
        max_prompt_tokens: int,
        max_new_tokens: int,
        eos_id: int,
        dtype: Any = "float32",
        head_precision: Precision = HIGHEST,
        tokenizer_path: str = "",
        unstack: bool | None = None,
    ):
        sizes = {"slots": slots, "decode_steps": decode_steps}
        sizes |= {"max_prompt_tokens": max_prompt_tokens, "max_new_tokens": max_new_tokens}
        for name, value in sizes.items():
            if value < 1:
                raise UserError(f"{name} is {value}; it must be at least 1")
        sharding.check_divides(mesh, ("heads", "kv_heads"), (model.heads, model.kv_heads), "sampler.mesh")
        if slots % mesh.shape["data"]:
            raise UserError(
                f"sampler.slots {slots} does not divide over data {mesh.shape['data']} of sampler.mesh; "
                f"use a multiple of {mesh.shape['data']}"
            )
        if max_prompt_tokens + max_new_tokens > model.max_context:
            raise UserError(
                f"max_prompt_tokens {max_prompt_tokens} + max_new_tokens {max_new_tokens} exceeds "
                f"model.max_context {model.max_context}; raise the context or lower one of them"
            )
        if not 0 <= eos_id < model.vocab_size:
            raise UserError(f"the end-of-sequence id {eos_id} is outside the vocabulary of {model.vocab_size} tokens")
        self.model = model
        self.slots = slots
        self.decode_steps = decode_steps
        self.max_prompt_tokens = max_prompt_tokens
        self.max_new_tokens = max_new_tokens
        self.eos_id = eos_id
        self.dtype = jnp.dtype(dtype)
        self._mesh = mesh
        self._head_precision = head_precision
        self._tokenizer_path = tokenizer_path
        self._prefill_rows = max(1, _PREFILL_TOKENS // max_prompt_tokens)
        self._abstract = abstract_params(model)
        self._param_shardings = sharding.param_shardings(mesh, logical_axes(model), self._abstract)
        whole: Any = sharding.replicated(mesh)
        prompts: Any = NamedSharding(mesh, PartitionSpec(None, None, None, "tensor", None))
        cache: Any = NamedSharding(mesh, PartitionSpec(None, "data", None, "tensor", None))
        per_slot: Any = NamedSharding(mesh, PartitionSpec("data"))
        self._whole = whole
        self._prefix_shardings = Prefix(k=prompts, v=prompts, lengths_P=whole, logits_PV=whole, version=whole)
        self._state_shardings = DecodeState(
            cache=KVCache(k=cache, v=cache),
            version=whole,
            **{f.name: per_slot for f in dataclasses.fields(DecodeState) if f.name.endswith("_S")},
        )
        states = self._state_shardings
        self._unstack = mesh.devices.flat[0].platform == "cpu" if unstack is None else unstack
        layer_shardings = jax.tree.map(
            # Layers stay whole on their stacking axis, so one layer's partition is the rest of the stack's.
            lambda s: NamedSharding(mesh, PartitionSpec(*s.spec[1:])),
            self._param_shardings["layers"],
        )
        self._copy_jits = {name: jax.jit(self._copy, out_shardings=s) for name, s in self._param_shardings.items()}
        self._copy_layer_jit = jax.jit(self._copy_layer, out_shardings=layer_shardings)
        self._init_jit = jax.jit(self._init, out_shardings=states)
        self._prefill_jit = jax.jit(self._prefill, out_shardings=self._prefix_shardings, static_argnames="rows")
        self._insert_jit = jax.jit(self._insert, out_shardings=states, donate_argnums=1)
        self._first_jit = jax.jit(self._first, out_shardings=whole)
        self._generate_jit = jax.jit(self._generate, out_shardings=(states, whole), donate_argnums=1)
        self._free_jit = jax.jit(self._free, out_shardings=states, donate_argnums=0)

    # Properties JetStream asks for.

    @property
    def max_concurrent_decodes(self) -> int:
        return self.slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        return self.max_prompt_tokens

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def colocated_cpus(self) -> None:
        return None

    def get_prefix_destination_sharding(self) -> Prefix:
        """A Prefix of shardings."""
        return self._prefix_shardings

    def get_tokenizer(self):
        return tokenizer_pb2.TokenizerParameters(path=self._tokenizer_path, extra_ids=0)

    # Weights.

    def load_params(self, params: Params) -> Params:
        """The engine's own copy of a policy's weights: cast to its dtype, on its mesh, never sharing a buffer.

        `params` may live anywhere in this process; they may be donated as soon as the result is ready. A pure
        function: any thread may call it while another one decodes.
        Raises UserError naming the first leaf that is missing, unknown or of another shape.
        """
        wanted, given = _leaves(self._abstract), _leaves(params)
        if missing := sorted(set(wanted) - set(given)):
            raise UserError(f"weights lack the leaf {missing[0]} (and {len(missing) - 1} more) of this model")
        if unknown := sorted(set(given) - set(wanted)):
            raise UserError(f"weights have a leaf {unknown[0]} (and {len(unknown) - 1} more) that this model has not")
        for name, leaf in wanted.items():
            if given[name].shape != leaf.shape:
                raise UserError(f"weights leaf {name} has shape {given[name].shape}; this model needs {leaf.shape}")
        # device_put shares buffers where it can, even with may_alias=False (a replicated array and one of its
        # shards); the trainer donates its buffers, so the copy is made by a program.
        placed = jax.device_put(params, self._param_shardings)
        copied = {name: copy(placed[name]) for name, copy in self._copy_jits.items() if name != "layers"}
        if self._unstack:
            # One small program, dispatched per layer: a single one of so many outputs takes seconds to compile.
            layers = tuple(self._copy_layer_jit(placed["layers"], np.int32(i)) for i in range(self.model.layers))
        else:
            layers = self._copy_jits["layers"](placed["layers"])
        return {**copied, "layers": layers}

    def _copy(self, params: Params) -> Params:
        return jax.tree.map(lambda x: jnp.array(x, self.dtype, copy=True), params)

    def _copy_layer(self, stacked: Params, index: Array) -> Params:
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False).astype(self.dtype), stacked)

    def device_version(self, version: int) -> Array:
        """A version number where decode states and prefixes keep it: an array, so that a new one compiles nothing."""
        return jax.device_put(np.int32(version), self._whole)

    # Prompts.

    def prefill_many(self, params: Params, prompts: Sequence[np.ndarray], version: Array, *, rows: int) -> Prefix:
        """Run up to `rows` prompts (int32 [T_i], 1 <= T_i <= max_prompt_tokens) through the model once.

        One program serves any number of prompts up to `rows`; its loop ends with the last prompt.
        """
        tokens = np.zeros((rows, self.max_prompt_tokens), np.int32)
        lengths = np.zeros(rows, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
            lengths[row] = len(prompt)
        return self._prefill_jit(params, tokens, lengths, np.int32(len(prompts)), version, rows=rows)

    def prefill(
        self,
        *,
        params: Params,
        existing_prefix: Prefix | None = None,
        padded_tokens: Array | np.ndarray,
        true_length: int,
        sampling: SlotSampling = SlotSampling(),
        version: Array | None = None,
    ) -> tuple[Prefix, PolicyResultTokens]:
        """One prompt (int32 [T], its first `true_length` tokens count) and its first sampled token.

        `insert` with the same `sampling` draws that same token.
        Raises UserError if the prompt is empty or longer than max_prompt_tokens, and on an existing prefix.
        """
        if existing_prefix is not None:
            raise UserError(
                "existing_prefix is given, but this engine shares prompts by group only; pass the whole prompt"
            )
        length = operator.index(true_length)
        if not 1 <= length <= self.max_prompt_tokens:
            raise UserError(f"a prompt has {length} tokens; this engine takes 1 to {self.max_prompt_tokens}")
        version = self.device_version(0) if version is None else version
        prefix = self.prefill_many(params, [np.asarray(padded_tokens)[:length]], version, rows=1)
        return prefix, _result(self._first_jit(prefix, self._table([(0, 0, sampling)], rows=1)), steps=1)

    def _prefill(
        self, params: Params, tokens_PT: Array, lengths_P: Array, prompts: Array, version: Array, *, rows: int
    ) -> Prefix:
        model, P, T = self.model, rows, self.max_prompt_tokens
        R = min(self._prefill_rows, P)
        padding = -P % R
        tokens_PT = jnp.pad(tokens_PT, ((0, padding), (0, 0)))
        padded_P = jnp.pad(lengths_P, (0, padding))
        empty = empty_cache(
            layers=model.layers,
            slots=P + padding,
            length=T,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            dtype=self.dtype,
        )
        positions_RT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (R, T))

        def chunk(i, carry):
            k, v, logits_PV = carry
            start = i * R
            tokens_RT = lax.dynamic_slice_in_dim(tokens_PT, start, R)
            lengths_R = lax.dynamic_slice_in_dim(padded_P, start, R)
            segments_RT = (positions_RT < lengths_R[:, None]).astype(jnp.int32)
            hidden_RTD, (k_new, v_new) = forward_with_kv(model, params, tokens_RT, positions_RT, segments_RT)
            last_RD = jnp.take_along_axis(hidden_RTD, jnp.maximum(lengths_R - 1, 0)[:, None, None], axis=1)[:, 0]
            logits_RV = project_f32(last_RD, head_weight(params), precision=self._head_precision)
            return (
                lax.dynamic_update_slice_in_dim(k, k_new.astype(k.dtype), start, axis=1),
                lax.dynamic_update_slice_in_dim(v, v_new.astype(v.dtype), start, axis=1),
                lax.dynamic_update_slice_in_dim(logits_PV, logits_RV, start, axis=0),
            )

        start = (empty.k, empty.v, jnp.zeros((P + padding, model.vocab_size), jnp.float32))
        k, v, logits_PV = lax.fori_loop(0, -(-prompts // R), chunk, start)
        return Prefix(k=k, v=v, lengths_P=padded_P, logits_PV=logits_PV, version=version)

    # Slots.

    def init_decode_state(self, version: int = 0) -> DecodeState:
        """Empty slots."""
        return self._init_jit(self.device_version(version))

    def _init(self, version: Array) -> DecodeState:
        S, model = self.slots, self.model
        zeros = jnp.zeros(S, jnp.int32)
        return DecodeState(
            cache=empty_cache(
                layers=model.layers,
                slots=S,
                length=self.max_prompt_tokens + self.max_new_tokens,
                kv_heads=model.kv_heads,
                head_dim=model.head_dim,
                dtype=self.dtype,
            ),
            tokens_S=zeros,
            positions_S=zeros,
            generated_S=zeros,
            limits_S=zeros,
            temperatures_S=jnp.zeros(S, jnp.float32),
            keys_S=request_keys(*(jnp.zeros(S, jnp.uint32),) * 3),
            active_S=jnp.zeros(S, bool),
            fresh_S=jnp.zeros(S, bool),
            first_logprobs_S=jnp.zeros(S, jnp.float32),
            first_versions_S=zeros,
            version=version,
        )

    def insert(
        self, prefix: Prefix, decode_state: DecodeState, slot: int, sampling: SlotSampling = SlotSampling()
    ) -> DecodeState:
        """Put the prefix's first prompt into one slot."""
        return self.insert_many(prefix, decode_state, [(slot, 0, sampling)])

    def bulk_insert(
        self, prefix: Prefix, decode_state: DecodeState, slots: Sequence[int], samplings: Sequence[SlotSampling]
    ) -> DecodeState:
        """Put the prefix's first prompt into several slots, each with its own sampling."""
        return self.insert_many(
            prefix, decode_state, [(slot, 0, sampling) for slot, sampling in zip(slots, samplings, strict=True)]
        )

    def insert_many(
        self, prefix: Prefix, decode_state: DecodeState, entries: Sequence[tuple[int, int, SlotSampling]]
    ) -> DecodeState:
        """Put rows of a prefix into slots: entries (slot, row of the prefix, sampling), each slot once.

        Samples each entry's first token. Only the slots named are written.
        """
        return self._insert_jit(prefix, decode_state, self._table(entries, self.slots))

    def _table(self, entries: Sequence[tuple[int, int, SlotSampling]], rows: int) -> np.ndarray:
        table = np.zeros((rows, 8), np.int32)
        slots = [slot for slot, _, _ in entries]
        table[slots, _PRESENT] = 1
        table[slots, _SOURCE] = [row for _, row, _ in entries]
        samplings = [sampling for _, _, sampling in entries]
        keys = np.array([(s.seed, s.stream, s.sibling) for s in samplings], np.uint32).view(np.int32)
        table[slots, _SEED : _SIBLING + 1] = keys
        table[slots, _LIMIT] = [
            self.max_new_tokens if s.max_new_tokens is None else s.max_new_tokens for s in samplings
        ]
        table[slots, _TEMPERATURE] = np.array([s.temperature for s in samplings], np.float32).view(np.int32)
        table[: len(slots), _ORDER] = slots
        return table

    def _sample_first(self, prefix: Prefix, table: Array) -> tuple[Array, Array, Array, Array]:
        """Keys, temperatures, first tokens and their log-probabilities of a table's rows."""
        seed, stream, sibling = (
            lax.bitcast_convert_type(table[:, column], jnp.uint32) for column in (_SEED, _STREAM, _SIBLING)
        )
        keys = request_keys(seed, stream, sibling)
        temperatures = lax.bitcast_convert_type(table[:, _TEMPERATURE], jnp.float32)
        logits = prefix.logits_PV[table[:, _SOURCE]]
        tokens, logprobs = sample(logits, temperatures, token_keys(keys, jnp.zeros(len(table), jnp.int32)))
        return keys, temperatures, tokens, logprobs

    def _first(self, prefix: Prefix, table: Array) -> Array:
        _, _, tokens, logprobs = self._sample_first(prefix, table)
        one, nothing = jnp.ones_like(tokens), jnp.zeros_like(tokens)
        goes_on = ((tokens != self.eos_id) & (table[:, _LIMIT] > 1)).astype(jnp.int32)
        bits = lax.bitcast_convert_type(logprobs, jnp.int32)
        version = jnp.broadcast_to(prefix.version, tokens.shape)
        columns = (nothing, tokens, nothing, one, nothing, bits, nothing, version, one, goes_on)
        return jnp.stack(columns, axis=1)

    def _insert(self, prefix: Prefix, state: DecodeState, table: Array) -> DecodeState:
        keys, temperatures, tokens, logprobs = self._sample_first(prefix, table)
        present, limits = table[:, _PRESENT] != 0, table[:, _LIMIT]
        lengths = prefix.lengths_P[table[:, _SOURCE]]

        # A loop of slice updates touches the slots written and nothing else, and ends with the last of them.
        def write(i, kv):
            slot = table[i, _ORDER]
            row = table[slot, _SOURCE]
            return tuple(
                lax.dynamic_update_slice(cache, lax.dynamic_slice_in_dim(new, row, 1, axis=1), (0, slot, 0, 0, 0))
                for cache, new in zip(kv, (prefix.k, prefix.v), strict=True)
            )

        k, v = lax.fori_loop(0, jnp.sum(present), write, (state.cache.k, state.cache.v))

        def put(new, old):
            return jnp.where(present, new, old)

        return DecodeState(
            cache=KVCache(k=k, v=v),
            tokens_S=put(tokens, state.tokens_S),
            positions_S=put(lengths, state.positions_S),
            generated_S=put(1, state.generated_S),
            limits_S=put(limits, state.limits_S),
            temperatures_S=put(temperatures, state.temperatures_S),
            keys_S=put(keys, state.keys_S),
            active_S=put((tokens != self.eos_id) & (limits > 1), state.active_S),
            fresh_S=put(True, state.fresh_S),
            first_logprobs_S=put(logprobs, state.first_logprobs_S),
            first_versions_S=put(prefix.version, state.first_versions_S),
            version=state.version,
        )

    def free_resource(self, decode_state: DecodeState, slots: Sequence[int]) -> DecodeState:
        """Stop decoding these slots; what they have not reported is lost."""
        freed = np.zeros(self.slots, bool)
        freed[list(slots)] = True
        return self._free_jit(decode_state, freed)

    def _free(self, state: DecodeState, freed_S: Array) -> DecodeState:
        return dataclasses.replace(state, active_S=state.active_S & ~freed_S, fresh_S=state.fresh_S & ~freed_S)

    # Decoding.

    def generate(self, params: Params, decode_state: DecodeState) -> tuple[DecodeState, PolicyResultTokens]:
        """Up to `decode_steps` tokens for every active slot, and the first tokens of newly inserted slots.

        `params` come from `load_params`; passing another version's is all that a weight swap is.
        """
        state, data = self._generate_jit(params, decode_state)
        return state, _result(data, self.decode_steps)

    def _generate(self, params: Params, state: DecodeState) -> tuple[DecodeState, Array]:
        model, steps = self.model, self.decode_steps
        head_VD = head_weight(params)

        def report(tokens, valid, logprobs, versions):
            return jnp.stack([tokens, valid.astype(jnp.int32), lax.bitcast_convert_type(logprobs, jnp.int32), versions])

        def unfinished(carry):
            step, state, _ = carry
            return (step <= steps) & jnp.any(state.active_S)

        def body(carry):
            step, state, reports = carry
            active = state.active_S
            hidden_SD, cache = decode(model, params, state.tokens_S, state.positions_S, state.cache)
            logits_SV = project_f32(hidden_SD, head_VD, precision=self._head_precision)
            keys = token_keys(state.keys_S, state.generated_S)
            tokens, logprobs = sample(logits_SV, state.temperatures_S, keys)
            generated = state.generated_S + active
            reports = reports.at[step].set(
                report(tokens, active, logprobs, jnp.broadcast_to(state.version, tokens.shape))
            )
            return (
                step + 1,
                dataclasses.replace(
                    state,
                    cache=cache,
                    tokens_S=jnp.where(active, tokens, state.tokens_S),
                    positions_S=state.positions_S + active,
                    generated_S=generated,
                    active_S=active & (tokens != self.eos_id) & (generated < state.limits_S),
                ),
                reports,
            )

        reports = jnp.zeros((steps + 1, 4, self.slots), jnp.int32)
        first = report(state.tokens_S, state.fresh_S, state.first_logprobs_S, state.first_versions_S)
        reports = reports.at[0].set(first)
        state = dataclasses.replace(state, fresh_S=jnp.zeros_like(state.fresh_S))
        _, state, reports = lax.while_loop(unfinished, body, (1, state, reports))
        columns = reports.transpose(2, 1, 0).reshape(self.slots, -1)
        tail = jnp.stack([state.generated_S, state.active_S.astype(jnp.int32)], axis=1)
        return state, jnp.concatenate([columns, tail], axis=1)


def _leaves(tree: Params) -> dict[str, Any]:
    keystr = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    return {keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
