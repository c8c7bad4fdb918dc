"""PolicyEngine: JetStream's Engine over the policy's own modules, with per-slot sampling and per-token versions.

Suffixes: S slots, P prompts of one prefill, R prompts of one pass, T positions of a padded prompt, V vocabulary.
"""

import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm import sharding
from jaxrl_llm.config import ModelConfig
from jaxrl_llm.losses.logprobs import project_f32, soft_cap
from jaxrl_llm.models.buckets import length_buckets
from jaxrl_llm.models.kv_cache import Cache, copy_row, copy_rows, empty_cache, slot_axis
from jaxrl_llm.models.transformer import decode, extend, head_weight, slot_rotations
from jaxrl_llm.sampler.interruption import Interruption
from jaxrl_llm.sampler.jetstream import Engine, tokenizer_pb2
from jaxrl_llm.sampler.loading import WeightLoader
from jaxrl_llm.sampler.results import PolicyResultTokens, result_tokens
from jaxrl_llm.sampler.scoring import score
from jaxrl_llm.sampler.slots import (
    FREE,
    Entry,
    Report,
    Slots,
    advance,
    entry_table,
    free_slots,
    no_report,
    read_table,
    slot_shardings,
)
from jaxrl_llm.types import Params, SampleRequest, Sampling, UserError

# A pass of the prefill loop holds about this many tokens: enough for the matrix products to be worth their weights'
# trip through memory, few enough that a short batch pads little. A CPU is there with few.
_PASS_TOKENS = {"cpu": 64}
_PASS_TOKENS_ELSEWHERE = 1024
# Keys of at most about this many tokens wait in one Prefix for their slots.
_PREFIX_TOKENS = 4096
# One insertion samples first tokens for so many logits: few enough that a single group is cheap to insert.
_INSERT_LOGITS = 2**20
# Scoring a prompt makes so many logits at a time.
_SCORE_LOGITS = 2**22


@flax.struct.dataclass
class Prefix:
    """Prefilled prompts, a row each: their keys and values, lengths [P], next-token logits float32 [P V]."""

    cache: Cache
    lengths: Array  # int32
    logits: Array
    version: Array  # int32 [], the weights that made it


@flax.struct.dataclass
class DecodeState:
    """The slots and their keys; `first` holds the token sampled at insertion until a dispatch has reported it."""

    cache: Cache
    slots: Slots
    first: Report
    version: Array  # int32 [], of the weights the next dispatch samples with


class PolicyEngine(Engine):
    """Decodes up to `slots` sequences at once on `mesh`; JetStream's Engine API and the batched forms of it.

    Keyword arguments:
      mesh: from `sharding.make_mesh`; slots are split over `data`, heads, feed-forward and vocabulary over `tensor`,
        experts over `expert` (along which everything else is repeated).
      decode_steps: most decode steps of one `generate`; it stops earlier when no slot runs, or when enough slots have
        ended for the caller to refill them.
      max_prompt_tokens, max_new_tokens: most of each in one request.
      context: a slot's cache holds so many tokens of prompt and completion; their sum by default. A smaller one serves
        requests that trade one for the other, such as the turns of an episode.
      eos_id: the token that ends a completion; it is the completion's last token.
      dtype: of the engine's copy of the weights; activations have the model's `compute_dtype`.
      kv_dtype: of the cache; int8 keeps a float32 scale per head and position. None is `dtype`.
      int8_weights: quantise the layers' matrices. Like an int8 cache it makes the sampler another policy than the
        trainer's, by as much as the mismatch metrics then say.
      prefill_buckets: lengths that prompts are padded to, each a program; powers of two by default.
      prefill_chunk: a longer prompt is prefilled in chunks of so many tokens, between which others decode.
      interruption: what a completion with a thinking budget is given when the budget is used up.
      top_logprobs: most alternatives that a request may ask for at every token. Above 0 prompts can be scored too
        (`prefill_scored`); at 0 there is no program for either.
      tokenizer_path: what `get_tokenizer` tells JetStream's server.
      unstack: keep each layer's weights and cache in buffers of their own (a tuple of layers instead of a stack); by
        default on CPU only, where it is faster by more than a third.

    Raises UserError if slots or heads do not divide over the mesh or it splits tokens, if `context` exceeds the model's
    or has no room for the longest prompt and a token more, on buckets that do not end with max_prompt_tokens, or if an
    id is no token.

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
        context: int | None = None,
        eos_id: int,
        dtype: Any = "float32",
        kv_dtype: Any = None,
        int8_weights: bool = False,
        prefill_buckets: Sequence[int] | None = None,
        prefill_chunk: int = 512,
        interruption: Interruption | None = None,
        top_logprobs: int = 0,
        tokenizer_path: str = "",
        unstack: bool | None = None,
    ):
        sizes = {"slots": slots, "decode_steps": decode_steps, "prefill_chunk": prefill_chunk}
        sizes |= {"max_prompt_tokens": max_prompt_tokens, "max_new_tokens": max_new_tokens}
        for name, value in sizes.items():
            if value < 1:
                raise UserError(f"{name} is {value}; it must be at least 1")
        sharding.check_whole_rows(mesh, "sampler.mesh")
        sharding.check_divides(mesh, ("heads", "kv_heads"), (model.heads, model.kv_heads), "sampler.mesh")
        if slots % mesh.shape["data"]:
            raise UserError(
                f"sampler.slots {slots} does not divide over data {mesh.shape['data']} of sampler.mesh; "
                f"use a multiple of {mesh.shape['data']}"
            )
        if context is None:
            context = max_prompt_tokens + max_new_tokens
            if context > model.max_context:
                raise UserError(
                    f"max_prompt_tokens {max_prompt_tokens} + max_new_tokens {max_new_tokens} exceeds "
                    f"model.max_context {model.max_context}; raise the context or lower one of them"
                )
        if not max(max_prompt_tokens, max_new_tokens) < context <= model.max_context:
            raise UserError(
                f"context {context} is not above max_prompt_tokens {max_prompt_tokens} and max_new_tokens "
                f"{max_new_tokens}, or exceeds model.max_context {model.max_context}"
            )
        if not 0 <= eos_id < model.vocab_size:
            raise UserError(f"the end-of-sequence id {eos_id} is outside the vocabulary of {model.vocab_size} tokens")
        if not 0 <= top_logprobs <= model.vocab_size:
            raise UserError(
                f"top_logprobs is {top_logprobs}; use 0 (off) to the {model.vocab_size} tokens of the vocabulary"
            )
        if interruption is not None:
            interruption.check(model.vocab_size)
        platform = mesh.devices.flat[0].platform
        self.model = model
        self.slots = slots
        self.decode_steps = decode_steps
        self.max_prompt_tokens = max_prompt_tokens
        self.max_new_tokens = max_new_tokens
        self.context = context
        self.eos_id = eos_id
        self.interruption = interruption
        self.top_logprobs = top_logprobs
        self.dtype = jnp.dtype(dtype)
        self.kv_dtype = jnp.dtype(kv_dtype or dtype)
        self.prefill_chunk = prefill_chunk
        self.buckets = _buckets(prefill_buckets, min(max_prompt_tokens, prefill_chunk))
        self._mesh = mesh
        self._tokenizer_path = tokenizer_path
        self._pass_tokens = _PASS_TOKENS.get(platform, _PASS_TOKENS_ELSEWHERE)
        self._entries = min(slots, 64, max(8, _INSERT_LOGITS // model.vocab_size))
        self._unstack = platform == "cpu" if unstack is None else unstack
        self._loader = WeightLoader(model, mesh, dtype=dtype, int8=int8_weights, unstack=self._unstack)
        whole: Any = sharding.replicated(mesh)
        per_slot: Any = NamedSharding(mesh, PartitionSpec("data"))
        self._whole = whole
        self._prefix_shardings = Prefix(
            cache=self._cache_shardings(None),
            lengths=whole,
            logits=whole,
            version=whole,
        )
        slots_shardings, report_shardings = slot_shardings(per_slot)
        self._state_shardings = DecodeState(
            cache=self._cache_shardings("data"), slots=slots_shardings, first=report_shardings, version=whole
        )
        states, prefixes = self._state_shardings, self._prefix_shardings
        self._init_jit = jax.jit(self._init, out_shardings=states)
        self._prefill_jit = jax.jit(lambda *given: self._prefill(*given, scored=False)[0], out_shardings=prefixes)
        self._prefill_scored_jit = jax.jit(partial(self._prefill, scored=True), out_shardings=(prefixes, whole))
        self._begin_jit = jax.jit(self._begin, out_shardings=prefixes)
        self._extend_jit = jax.jit(self._extend, out_shardings=prefixes, donate_argnums=1)
        self._extend_scored_jit = jax.jit(self._extend_scored, out_shardings=(prefixes, whole), donate_argnums=1)
        self._insert_jit = jax.jit(self._insert, out_shardings=states, donate_argnums=1)
        self._first_jit = jax.jit(self._first, out_shardings=whole)
        self._generate_jit = jax.jit(self._generate, out_shardings=(states, whole), donate_argnums=1)
        self._free_jit = jax.jit(self._free, out_shardings=states, donate_argnums=0)
        self._recompute_jit = jax.jit(self._recompute, out_shardings=states, donate_argnums=1)

    def _cache_shardings(self, rows: str | None) -> Any:
        def place(leaf):
            return NamedSharding(self._mesh, PartitionSpec(*[None] * slot_axis(leaf), rows, "tensor", None, None))

        return jax.tree.map(place, jax.eval_shape(lambda: self._empty_cache(1, 1)))

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
        """The engine's own copy of a policy's weights; see `WeightLoader.load`."""
        return self._loader.load(params)

    def device_version(self, version: int) -> Array:
        """A version number where decode states and prefixes keep it: an array, so that a new one compiles nothing."""
        return jax.device_put(np.int32(version), self._whole)

    def warm_up(self, params: Params, decode_state: DecodeState | None = None) -> DecodeState:
        """Run every program of this engine once (weights from `load_params`), so that nothing compiles later.

        `decode_state` is one in which no slot runs, a new one by default; it is given back so.
        """
        version = self.device_version(0)
        state = self.init_decode_state() if decode_state is None else decode_state
        for bucket in self.buckets:
            prompts = [np.zeros(bucket, np.int32)]
            state = self.insert(self.prefill_many(params, prompts, version), state, 0)
            if self.top_logprobs:
                jax.block_until_ready(self.prefill_scored(params, prompts, version))
        if self.max_prompt_tokens > self.prefill_chunk:
            prompt = np.zeros(self.prefill_chunk, np.int32)
            state = self.insert(self.extend_prefill(params, self.begin_prefill(version), prompt, 0), state, 0)
            if self.top_logprobs:
                jax.block_until_ready(self.extend_scored(params, self.begin_prefill(version), prompt, 0))
        state = self.recompute(params, state, {0: np.zeros(2, np.int32)})
        state, _ = self.generate(params, state)
        return jax.block_until_ready(self.free_resource(state, [0]))

    # Prompts.

    def bucket(self, length: int) -> int:
        """The length that a prompt of `length` tokens is padded to; above `prefill_chunk` it goes in chunks."""
        return next(bucket for bucket in (*self.buckets, self._chunked) if bucket >= length)

    @property
    def _chunked(self) -> int:
        """Positions of a prefix that is prefilled in chunks: whole chunks."""
        return -(-self.max_prompt_tokens // self.prefill_chunk) * self.prefill_chunk

    def prefill_rows(self, bucket: int) -> int:
        """How many prompts one `prefill_many` of this bucket takes."""
        return max(1, min(self.slots, _PREFIX_TOKENS // bucket))

    def prefill_many(self, params: Params, prompts: Sequence[np.ndarray], version: Array) -> Prefix:
        """Run prompts (int32 [T_i]) of one bucket through the model once, at most `prefill_rows` of them.

        One program serves any number of them; its loop ends with the last prompt.
        """
        return self._prefill_jit(params, *self._padded(prompts), version)

    def prefill_scored(self, params: Params, prompts: Sequence[np.ndarray], version: Array) -> tuple[Prefix, Array]:
        """`prefill_many`, and what `scoring.score` says of every prompt's tokens from the second on: int32
        [P, T, 1 + 2 top_logprobs], for `ScoredPrompts` to read."""
        return self._prefill_scored_jit(params, *self._padded(prompts), version)

    def _padded(self, prompts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.int32]:
        bucket = self.bucket(max(map(len, prompts)))
        rows = self.prefill_rows(bucket)
        passes = -(-rows // self._pass_rows(bucket))
        tokens = np.zeros((passes * self._pass_rows(bucket), bucket), np.int32)
        lengths = np.ones(len(tokens), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
            lengths[row] = len(prompt)
        return tokens, lengths, np.int32(len(prompts))

    def begin_prefill(self, version: Array) -> Prefix:
        """An empty prefix of one long prompt, for `extend_prefill`."""
        return self._begin_jit(version)

    def extend_prefill(self, params: Params, prefix: Prefix, prompt: np.ndarray, start: int) -> Prefix:
        """The next `prefill_chunk` tokens of a prompt (int32 [T]) from `start` on; the last chunk makes the logits."""
        return self._extend_jit(params, prefix, *self._chunk(prompt, start))

    def extend_scored(self, params: Params, prefix: Prefix, prompt: np.ndarray, start: int) -> tuple[Prefix, Array]:
        """`extend_prefill`, and the scores of the tokens after each of the chunk's as in `prefill_scored`, P = 1."""
        following = np.int32(prompt[min(start + self.prefill_chunk, len(prompt) - 1)])
        return self._extend_scored_jit(params, prefix, *self._chunk(prompt, start), following)

    def _chunk(self, prompt: np.ndarray, start: int) -> tuple[np.ndarray, np.int32, np.int32]:
        chunk = np.zeros((1, self.prefill_chunk), np.int32)
        part = prompt[start : start + self.prefill_chunk]
        chunk[0, : len(part)] = part
        return chunk, np.int32(start), np.int32(len(part))

    def prefill(
        self,
        *,
        params: Params,
        existing_prefix: Prefix | None = None,
        padded_tokens: Array | np.ndarray,
        true_length: int,
        request: SampleRequest | None = None,
        version: Array | None = None,
    ) -> tuple[Prefix, PolicyResultTokens]:
        """One prompt (int32 [T], its first `true_length` tokens count) and its first sampled token.

        `insert` with the same `request` draws that same token; without one, decoding is greedy.
        Raises UserError if the prompt is empty or longer than max_prompt_tokens, and on an existing prefix.
        """
        return self.prefill_multisampling(
            params=params,
            existing_prefix=existing_prefix,
            padded_tokens=padded_tokens,
            true_length=true_length,
            requests=[request or self._greedy()],
            version=version,
        )

    def prefill_multisampling(
        self,
        *,
        params: Params,
        existing_prefix: Prefix | None = None,
        padded_tokens: Array | np.ndarray,
        true_length: int,
        requests: Sequence[SampleRequest],
        version: Array | None = None,
    ) -> tuple[Prefix, PolicyResultTokens]:
        """`prefill` with the first token of several requests for that prompt: samples of slot 0 of the result."""
        if existing_prefix is not None:
            raise UserError(
                "existing_prefix is given, but this engine shares prompts by group only; pass the whole prompt"
            )
        length = operator.index(true_length)
        if not 1 <= length <= self.max_prompt_tokens:
            raise UserError(f"a prompt has {length} tokens; this engine takes 1 to {self.max_prompt_tokens}")
        if not 1 <= len(requests) <= self._entries:
            raise UserError(f"{len(requests)} samples of one prefill are asked; this engine takes 1 to {self._entries}")
        version = self.device_version(0) if version is None else version
        prompt = np.asarray(padded_tokens)[:length]
        if length > self.prefill_chunk:
            prefix = self.begin_prefill(version)
            for start in range(0, length, self.prefill_chunk):
                prefix = self.extend_prefill(params, prefix, prompt, start)
        else:
            prefix = self.prefill_many(params, [prompt], version)
        table = self._table([(slot, 0, request) for slot, request in enumerate(requests)])
        data = self._first_jit(prefix, table)[: len(requests)]
        return prefix, result_tokens(data, steps=1, samples_per_slot=len(requests))

    def _greedy(self) -> SampleRequest:
        return SampleRequest(np.zeros(0, np.int32), Sampling(self.max_new_tokens, temperature=0.0))

    def _pass_rows(self, bucket: int) -> int:
        return min(self.prefill_rows(bucket), max(1, self._pass_tokens // bucket))

    def _empty_cache(self, rows: int, length: int) -> Cache:
        model = self.model
        return empty_cache(
            layers=model.layers,
            slots=rows,
            length=length,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            dtype=self.kv_dtype,
            unstack=self._unstack,
        )

    def _logits(self, params: Params, hidden: Array) -> Array:
        logits = project_f32(hidden, head_weight(params), dtype=self.model.head_dtype)
        return soft_cap(logits, self.model.final_softcap)

    def _scores(self, params: Params, hidden_RTD: Array, tokens_RT: Array, following_R: Array) -> Array:
        """int32 [R, T, 1 + 2 A]: each place's next token scored, in pieces whose logits fit _SCORE_LOGITS."""
        R, T, D = hidden_RTD.shape
        size = max(1, min(R * T, _SCORE_LOGITS // self.model.vocab_size))
        targets_RT = jnp.concatenate([tokens_RT[:, 1:], following_R[:, None]], axis=1)

        def pieces(x, *width):
            return jnp.pad(x.reshape(-1, *width), [(0, -(R * T) % size)] + [(0, 0)] * len(width)).reshape(
                -1, size, *width
            )

        def one_piece(xs):
            hidden_ND, targets_N = xs
            return score(self._logits(params, hidden_ND), targets_N, self.top_logprobs)

        scored = lax.map(one_piece, (pieces(hidden_RTD, D), pieces(targets_RT)))
        return scored.reshape(-1, scored.shape[-1])[: R * T].reshape(R, T, -1)

    def _prefill(
        self, params: Params, tokens_PT: Array, lengths_P: Array, prompts: Array, version: Array, *, scored: bool
    ) -> tuple[Prefix, Array]:
        P, T = tokens_PT.shape
        R = self._pass_rows(T)

        def one_pass(i, carry):
            cache, logits_PV, scores = carry
            first = i * R
            tokens_RT = lax.dynamic_slice_in_dim(tokens_PT, first, R)
            lengths_R = lax.dynamic_slice_in_dim(lengths_P, first, R)
            hidden_RTD, new = extend(
                self.model, params, tokens_RT, jnp.int32(0), self._empty_cache(R, T), mesh=self._mesh
            )
            last_RD = jnp.take_along_axis(hidden_RTD, (lengths_R - 1)[:, None, None], axis=1)[:, 0]
            logits_PV = lax.dynamic_update_slice_in_dim(logits_PV, self._logits(params, last_RD), first, axis=0)
            if scored:
                theirs = self._scores(params, hidden_RTD, tokens_RT, jnp.zeros(R, jnp.int32))
                scores = lax.dynamic_update_slice_in_dim(scores, theirs, first, axis=0)
            return copy_rows(cache, first, new), logits_PV, scores

        start = (
            self._empty_cache(P, T),
            jnp.zeros((P, self.model.vocab_size), jnp.float32),
            jnp.zeros((P, T, 1 + 2 * self.top_logprobs) if scored else 0, jnp.int32),
        )
        cache, logits_PV, scores = lax.fori_loop(0, -(-prompts // R), one_pass, start)
        return Prefix(cache, lengths_P, logits_PV, version), scores

    def _begin(self, version: Array) -> Prefix:
        logits = jnp.zeros((1, self.model.vocab_size), jnp.float32)
        return Prefix(self._empty_cache(1, self._chunked), jnp.zeros(1, jnp.int32), logits, version)

    def _extend(self, params: Params, prefix: Prefix, chunk_1T: Array, start: Array, length: Array) -> Prefix:
        return self._extended(params, prefix, chunk_1T, start, length)[0]

    def _extend_scored(
        self, params: Params, prefix: Prefix, chunk_1T: Array, start: Array, length: Array, following: Array
    ) -> tuple[Prefix, Array]:
        prefix, hidden_1TD = self._extended(params, prefix, chunk_1T, start, length)
        return prefix, self._scores(params, hidden_1TD, chunk_1T, following[None])

    def _extended(self, params, prefix: Prefix, chunk_1T, start, length) -> tuple[Prefix, Array]:
        hidden_1TD, cache = extend(self.model, params, chunk_1T, start, prefix.cache, mesh=self._mesh)
        last_1D = lax.dynamic_index_in_dim(hidden_1TD, length - 1, axis=1, keepdims=False)
        return Prefix(cache, (start + length)[None], self._logits(params, last_1D), prefix.version), hidden_1TD

    # Slots.

    def init_decode_state(self, version: int = 0) -> DecodeState:
        """Empty slots."""
        return self._init_jit(self.device_version(version))

    def _init(self, version: Array) -> DecodeState:
        return DecodeState(
            cache=self._empty_cache(self.slots, self.context),
            slots=free_slots(self.slots, self.interruption),
            first=no_report(self.slots, self.top_logprobs),
            version=version,
        )

    def insert(
        self, prefix: Prefix, decode_state: DecodeState, slot: int, request: SampleRequest | None = None
    ) -> DecodeState:
        """Put the prefix's first prompt into one slot."""
        return self.insert_many(prefix, decode_state, [(slot, 0, request or self._greedy())])

    def bulk_insert(
        self, prefix: Prefix, decode_state: DecodeState, slots: Sequence[int], requests: Sequence[SampleRequest]
    ) -> DecodeState:
        """Put the prefix's first prompt into several slots, each with its own request."""
        return self.insert_many(
            prefix, decode_state, [(slot, 0, request) for slot, request in zip(slots, requests, strict=True)]
        )

    def insert_many(self, prefix: Prefix, decode_state: DecodeState, entries: Sequence[Entry]) -> DecodeState:
        """Put rows of a prefix into slots: entries (slot, row of the prefix, request), each slot once.

        Samples each entry's first token. Only the slots named are written.
        """
        for start in range(0, len(entries), self._entries):
            part = entries[start : start + self._entries]
            decode_state = self._insert_jit(prefix, decode_state, self._table(part), np.int32(len(part)))
        return decode_state

    def _table(self, entries: Sequence[Entry]) -> np.ndarray:
        return entry_table(entries, self._entries, self.slots, self.eos_id)

    def _sample_first(self, prefix: Prefix, table: Array) -> tuple[Array, Array, Slots, Report]:
        slots, sources, contents = read_table(table, prefix.lengths, self.interruption)
        logits = prefix.logits[sources]
        contents, report = advance(contents, logits, prefix.version, self.interruption, self.top_logprobs)
        return slots, sources, contents, report

    def _first(self, prefix: Prefix, table: Array) -> Array:
        _, _, contents, report = self._sample_first(prefix, table)
        columns = jnp.stack([jnp.zeros_like(report.columns()), report.columns()]).transpose(2, 1, 0)
        return _with_tail(columns, contents)

    def _insert(self, prefix: Prefix, state: DecodeState, table: Array, entries: Array) -> DecodeState:
        slots, sources, contents, report = self._sample_first(prefix, table)

        # A loop of slice updates touches the slots written and nothing else, and ends with the last of them.
        def write(i, cache):
            return copy_row(cache, slots[i], prefix.cache, sources[i])

        put = _put_at(slots)
        return DecodeState(
            cache=lax.fori_loop(0, entries, write, state.cache),
            slots=jax.tree.map(put, state.slots, contents),
            first=jax.tree.map(put, state.first, report),
            version=state.version,
        )

    def free_resource(self, decode_state: DecodeState, slots: Sequence[int]) -> DecodeState:
        """Stop decoding these slots; what they have not reported is lost."""
        freed = np.zeros(self.slots, bool)
        freed[list(slots)] = True
        return self._free_jit(decode_state, freed)

    def _free(self, state: DecodeState, freed_S: Array) -> DecodeState:
        return replace(
            state,
            slots=replace(state.slots, status=jnp.where(freed_S, FREE, state.slots.status)),
            first=replace(state.first, flags=jnp.where(freed_S, 0, state.first.flags)),
        )

    def recompute(self, params: Params, decode_state: DecodeState, sequences: dict[int, np.ndarray]) -> DecodeState:
        """Replace the keys of slots by those that `params` give: slot -> its prompt and completion (int32 [T]).

        A completion's last token is not in the cache yet, and stays out.
        """
        chunk = min(self.prefill_chunk, self.context)
        tokens = np.zeros((self.slots, -(-self.context // chunk) * chunk), np.int32)
        lengths, order = np.zeros(self.slots, np.int32), np.zeros(self.slots, np.int32)
        for place, (slot, ids) in enumerate(sequences.items()):
            tokens[slot, : len(ids) - 1] = ids[:-1]
            lengths[slot], order[place] = len(ids) - 1, slot
        return self._recompute_jit(params, decode_state, tokens, lengths, order, np.int32(len(sequences)))

    def _recompute(self, params, state: DecodeState, tokens_SN, lengths_S, order_S, count) -> DecodeState:
        chunk = min(self.prefill_chunk, tokens_SN.shape[1])

        def one_slot(i, cache):
            slot = order_S[i]
            row_1N = lax.dynamic_slice_in_dim(tokens_SN, slot, 1)

            def one_chunk(j, own):
                tokens_1T = lax.dynamic_slice_in_dim(row_1N, j * chunk, chunk, axis=1)
                return extend(self.model, params, tokens_1T, j * chunk, own, mesh=self._mesh)[1]

            own = self._empty_cache(1, tokens_SN.shape[1])
            own = lax.fori_loop(0, -(-lengths_S[slot] // chunk), one_chunk, own)
            return copy_row(cache, slot, own, 0)

        return replace(state, cache=lax.fori_loop(0, count, one_slot, state.cache))

    # Decoding.

    def generate(
        self, params: Params, decode_state: DecodeState, stop_after: int | None = None
    ) -> tuple[DecodeState, PolicyResultTokens]:
        """Up to `decode_steps` tokens for every running slot, and the first tokens of newly inserted slots.

        It ends early when no slot runs, or as soon as `stop_after` slots that ran have ended. `params` come from
        `load_params`; passing another version's is all that a weight swap is.
        """
        enough = np.int32(self.slots + 1 if stop_after is None else stop_after)
        state, data = self._generate_jit(params, decode_state, enough)
        return state, result_tokens(data, self.decode_steps)

    def lower_generate(self) -> jax.stages.Lowered:
        """The program of `generate` lowered from shapes alone; the devices of its mesh need not be here."""
        version = jax.ShapeDtypeStruct((), jnp.int32)
        state = sharding.placed(jax.eval_shape(self._init, version), self._state_shardings)
        return self._generate_jit.lower(self._loader.abstract(), state, np.int32(1))

    def _generate(self, params: Params, state: DecodeState, enough: Array) -> tuple[DecodeState, Array]:
        steps = self.decode_steps
        ran = jnp.sum(state.slots.active)

        def unfinished(carry):
            step, _, slots, _, _ = carry
            running = jnp.sum(slots.active)
            return (step <= steps) & (running > 0) & (ran - running < enough)

        def body(carry):
            step, cache, slots, by_kind, reports = carry
            how = {"by_kind": by_kind, "mesh": self._mesh}
            hidden_SD, cache = decode(self.model, params, slots.tokens, slots.positions, cache, **how)
            logits_SV = self._logits(params, hidden_SD)
            slots, report = advance(slots, logits_SV, state.version, self.interruption, self.top_logprobs)
            by_kind = slot_rotations(self.model, slots.positions)
            return step + 1, cache, slots, by_kind, reports.at[step].set(report.columns())

        first = state.first.columns()
        reports = jnp.zeros((steps + 1, *first.shape), jnp.int32).at[0].set(first)
        start = (1, state.cache, state.slots, slot_rotations(self.model, state.slots.positions), reports)
        _, cache, slots, _, reports = lax.while_loop(unfinished, body, start)
        state = DecodeState(cache, slots, no_report(self.slots, self.top_logprobs), state.version)
        return state, _with_tail(reports.transpose(2, 1, 0), slots)


def _with_tail(columns_SCN: Array, slots: Slots) -> Array:
    columns = columns_SCN.reshape(len(columns_SCN), -1)
    return jnp.concatenate([columns, jnp.stack([slots.generated, slots.status], axis=1)], axis=1)


def _put_at(slots: Array):
    """Writes rows at `slots`; a slot that does not exist is dropped."""

    def put(old, new):
        return old.at[slots].set(new, mode="drop")

    return put


def _buckets(given: Sequence[int] | None, longest: int) -> tuple[int, ...]:
    """Prefill lengths, ascending, the last one `longest`."""
    if given is None:
        return length_buckets(longest)
    buckets = tuple(sorted(set(given)))
    if not buckets or buckets[0] < 1 or buckets[-1] != longest:
        raise UserError(
            f"sampler.prefill_buckets is {list(given)}; they are positive lengths and the longest is the smaller of "
            f"max_prompt_tokens and prefill_chunk, {longest}"
        )
    return buckets
