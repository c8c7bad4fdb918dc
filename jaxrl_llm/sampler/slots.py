"""What a slot of the engine holds, how a request enters it, and what one new token does to it.

Suffixes: S slots (or entries of an insertion), V vocabulary, P prompts of a prefix, M ids of the end-of-thinking mark.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxrl_llm.sampler.interruption import Interruption, draw_budgets
from jaxrl_llm.sampler.restrictions import Restrictions
from jaxrl_llm.sampler.sampling import Softmax, request_keys, sample, token_keys
from jaxrl_llm.types import FinishReason, SampleRequest, Sampling, ThinkingBudget

STOP_IDS, BIASED_IDS = 8, 16
"""How many of them a slot has room for."""

RUNNING, STOPPED, FULL, REPEATING, FREE = range(5)
FINISH: dict[int, FinishReason] = {STOPPED: "stop", FULL: "length", REPEATING: "repetition"}
"""Why a slot stopped decoding, by the code in `Slots.status`."""

VALID, FORCED = 1, 2
"""Bits of a reported token's flags."""

# A token is "certain" above this probability (MiniMax-M1, arXiv:2506.13585, section on early truncation).
_LOG_CERTAIN = float(np.log(0.99))


@flax.struct.dataclass
class Slots:
    """`tokens` is each slot's last token, not yet in the cache; it sits at `positions`. All fields lead with [S]."""

    tokens: Array  # int32
    positions: Array  # int32
    generated: Array  # int32
    limits: Array  # int32: tokens at which the completion is full
    status: Array  # int32: RUNNING or why not
    keys: Array  # PRNG keys
    temperatures: Array  # float32
    top_k: Array  # int32
    top_p: Array  # float32
    min_p: Array  # float32
    min_new: Array  # int32
    stop_ids: Array  # int32 [S, STOP_IDS], the end-of-sequence id among them; -1 is nothing
    biased: Array  # int32 [S, BIASED_IDS]; -1 is nothing
    biases: Array  # float32 [S, BIASED_IDS]; -inf is a ban
    certain_limit: Array  # int32, 0 is off
    certain: Array  # int32: consecutive certain tokens so far
    thinking_until: Array  # int32: tokens it may think; 0 when it does not (any more)
    answer: Array  # int32: tokens it may answer after its thinking
    forced: Array  # int32: index of the phrase's next token to force; the phrase's length when none is
    tail: Array  # int32 [S, max(M, 1)]: its last tokens
    alternatives: Array  # int32: how many of the likeliest tokens it wants to know with each of its own

    @property
    def active(self) -> Array:
        return self.status == RUNNING


@flax.struct.dataclass
class Report:
    """One token of each slot on its way to the host; `flags` 0 says that there is none.

    Beside it the A likeliest tokens there, where A is how many the engine keeps.
    """

    tokens: Array  # int32
    flags: Array  # int32
    logprobs: Array  # float32
    versions: Array  # int32
    likeliest: Array  # int32 [S, A]
    likeliest_logprobs: Array  # float32 [S, A]

    def columns(self) -> Array:
        """int32 [4 + 2 A, S]"""
        logprobs, theirs = (lax.bitcast_convert_type(x, jnp.int32) for x in (self.logprobs, self.likeliest_logprobs))
        own = jnp.stack([self.tokens, self.flags, logprobs, self.versions])
        return jnp.concatenate([own, self.likeliest.T, theirs.T])


def no_report(slots: int, alternatives: int) -> Report:
    zeros = jnp.zeros(slots, jnp.int32)
    return Report(zeros, zeros, jnp.zeros(slots, jnp.float32), zeros, *_no_alternatives(slots, alternatives))


def _no_alternatives(slots: int, alternatives: int) -> tuple[Array, Array]:
    shape = (slots, alternatives)
    return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)


# The table that tells the engine what enters which slot: one int32 row per entry.
_NUMBERS = (
    "slot", "source", "seed", "stream", "sibling", "limit", "temperature", "top_k", "top_p", "min_p", "min_new",
    "certain_limit", "lowest", "highest", "answer", "alternatives", "first",
)  # fmt: skip
_FLOATS = {"temperature", "top_p", "min_p"}
_STOPS = len(_NUMBERS)
_BIASED = _STOPS + STOP_IDS
_BIASES = _BIASED + BIASED_IDS
_WIDTH = _BIASES + BIASED_IDS

Entry = tuple[int, int, SampleRequest]
"""(slot, row of the prefix, request)"""


def entry_table(entries: Sequence[Entry], rows: int, slots: int, eos_id: int) -> np.ndarray:
    """The entries as an int32 table; rows beyond them name the slot number `slots`, which does not exist."""
    table = np.zeros((rows, _WIDTH), np.int32)
    table[:, 0] = slots
    if not entries:
        return table
    # Siblings usually share the very object, so most rows are copies.
    templates = {id(how): how for how in (request.sampling for _, _, request in entries)}
    templates = {key: _sampling_row(how, eos_id) for key, how in templates.items()}
    filled = table[: len(entries)]
    filled[:] = [templates[id(request.sampling)] for _, _, request in entries]
    filled[:, 0] = [slot for slot, _, _ in entries]
    filled[:, 1] = [source for _, source, _ in entries]
    keys = [(request.seed, request.stream, request.sibling) for _, _, request in entries]
    filled[:, 2:5] = np.array(keys, np.uint32).view(np.int32)
    filled[:, _NUMBERS.index("alternatives")] = [request.alternatives for _, _, request in entries]
    filled[:, _NUMBERS.index("first")] = [request.first for _, _, request in entries]
    return table


def _sampling_row(how: Sampling, eos_id: int) -> np.ndarray:
    budget = how.thinking or ThinkingBudget(0, 0, 0)
    numbers = {
        "limit": how.max_new_tokens, "temperature": how.temperature, "top_k": how.top_k, "top_p": how.top_p,
        "min_p": how.min_p, "min_new": how.min_new_tokens, "certain_limit": how.repetition_limit,
        "lowest": budget.lowest, "highest": budget.highest, "answer": budget.answer_tokens,
    }  # fmt: skip
    row = np.full(_WIDTH, -1, np.int32)
    for name, number in numbers.items():
        bits = np.float32(number).view(np.int32) if name in _FLOATS else number
        row[_NUMBERS.index(name)] = bits
    row[_STOPS] = eos_id
    row[_STOPS + 1 : _STOPS + 1 + len(how.stop_ids)] = how.stop_ids
    biases = [*((token, -np.inf) for token in how.banned_ids), *how.logit_bias]
    row[_BIASED : _BIASED + len(biases)] = [token for token, _ in biases]
    row[_BIASES : _BIASES + len(biases)] = np.array([bias for _, bias in biases], np.float32).view(np.int32)
    return row


def read_table(table: Array, lengths_P: Array, interruption: Interruption | None) -> tuple[Array, Array, Slots]:
    """(slots to write, rows of the prefix, the slots' contents before their first token) of a table."""

    def column(name):
        bits = table[:, _NUMBERS.index(name)]
        return lax.bitcast_convert_type(bits, jnp.float32) if name in _FLOATS else bits

    rows = len(table)
    keys = request_keys(*(lax.bitcast_convert_type(column(name), jnp.uint32) for name in ("seed", "stream", "sibling")))
    zeros, first = jnp.zeros(rows, jnp.int32), column("first")
    budgets = draw_budgets(keys, column("lowest"), column("highest"))
    return (
        column("slot"),
        column("source"),
        Slots(
            tokens=zeros,
            # The prompt's last token, whose logits the prefill left: the first token comes next.
            positions=lengths_P[column("source")] - 1,
            # Counted from an episode's first token on, and so are the limits: keys go on where the last turn ended.
            generated=first,
            limits=first + column("limit"),
            status=zeros + RUNNING,
            keys=keys,
            temperatures=column("temperature"),
            top_k=column("top_k"),
            top_p=column("top_p"),
            min_p=column("min_p"),
            min_new=first + column("min_new"),
            stop_ids=table[:, _STOPS:_BIASED],
            biased=table[:, _BIASED:_BIASES],
            biases=lax.bitcast_convert_type(table[:, _BIASES:], jnp.float32),
            certain_limit=column("certain_limit"),
            certain=zeros,
            thinking_until=jnp.where(budgets > 0, first + budgets, 0),
            answer=column("answer"),
            forced=zeros + (len(interruption.phrase) if interruption else 0),
            tail=jnp.full((rows, _tail_width(interruption)), -1, jnp.int32),
            alternatives=column("alternatives"),
        ),
    )


def free_slots(slots: int, interruption: Interruption | None) -> Slots:
    """Contents of slots that nothing has entered."""
    _, _, empty = read_table(jnp.zeros((slots, _WIDTH), jnp.int32), jnp.ones(1, jnp.int32), interruption)
    return replace(empty, status=jnp.full(slots, FREE, jnp.int32))


def advance(
    slots: Slots, logits_SV: Array, version: Array, interruption: Interruption | None, alternatives: int
) -> tuple[Slots, Report]:
    """The next token of every running slot, drawn from `logits_SV` or forced, and what follows from it.

    `alternatives` is how many of the likeliest tokens a slot can be told at most.
    """
    running = slots.active
    drawn, softmax = sample(
        logits_SV, slots.temperatures, token_keys(slots.keys, slots.generated), _restrictions(slots)
    )
    if interruption is None:
        tokens, forcing = drawn, jnp.zeros_like(running)
    else:
        phrase = jnp.array(interruption.phrase, jnp.int32)
        forcing = slots.forced < len(interruption.phrase)
        tokens = jnp.where(forcing, phrase[jnp.minimum(slots.forced, len(interruption.phrase) - 1)], drawn)
    logprobs = softmax.logprob(logits_SV, tokens)
    generated = slots.generated + 1
    stopped = jnp.any(tokens[:, None] == slots.stop_ids, axis=1) & ~forcing
    certain = jnp.where((logprobs > _LOG_CERTAIN) & ~forcing, slots.certain + 1, 0)
    after = replace(slots, tokens=tokens, positions=slots.positions + 1, generated=generated, certain=certain)
    if interruption is not None:
        after = _think(after, forcing, interruption)
    repeating = (slots.certain_limit > 0) & (certain >= slots.certain_limit)
    status = jnp.where(repeating, REPEATING, RUNNING)
    status = jnp.where(generated >= after.limits, FULL, status)
    after = replace(after, status=jnp.where(stopped, STOPPED, status))

    def keep(new, old):
        return jnp.where(running.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    flags = running * (VALID + FORCED * forcing)
    versions = jnp.broadcast_to(version, tokens.shape)
    likeliest = _likeliest(running & (slots.alternatives > 0), logits_SV, softmax, alternatives)
    report = Report(tokens, flags.astype(jnp.int32), logprobs, versions, *likeliest)
    return jax.tree.map(keep, after, slots), report


def _likeliest(wanted_S: Array, logits_SV: Array, softmax: Softmax, count: int) -> tuple[Array, Array]:
    """(ids, log-probabilities) [S count] of the likeliest tokens; zeros, at no cost, while no slot wants them."""
    nothing = _no_alternatives(len(wanted_S), count)
    if not count:
        return nothing

    def find() -> tuple[Array, Array]:
        logits_SA, ids_SA = lax.top_k(logits_SV, count)
        return ids_SA, softmax.of(logits_SA)

    return lax.cond(jnp.any(wanted_S), find, lambda: nothing)


def _think(after: Slots, forcing: Array, interruption: Interruption) -> Slots:
    """End the thinking of slots that wrote the mark or reached their budget, and walk through the phrase."""
    length = len(interruption.phrase)
    tail = jnp.concatenate([after.tail[:, 1:], after.tokens[:, None]], axis=1)
    thinking = (after.thinking_until > 0) & ~forcing
    if interruption.end_of_thinking:
        mark = jnp.array(interruption.end_of_thinking, jnp.int32)
        marked = thinking & jnp.all(tail == mark[None], axis=1)
    else:
        marked = jnp.zeros_like(thinking)
    due = thinking & ~marked & (after.generated >= after.thinking_until)
    forced = jnp.where(due, 0, jnp.where(forcing, after.forced + 1, after.forced))
    answers = marked | (forcing & (forced == length))
    return replace(
        after,
        tail=tail,
        forced=forced,
        thinking_until=jnp.where(marked | due, 0, after.thinking_until),
        limits=jnp.where(answers, jnp.minimum(after.limits, after.generated + after.answer), after.limits),
    )


def _restrictions(slots: Slots) -> Restrictions:
    early = slots.generated < slots.min_new
    biased = jnp.concatenate([slots.biased, jnp.where(early[:, None], slots.stop_ids, -1)], axis=1)
    biases = jnp.concatenate([slots.biases, jnp.full(slots.stop_ids.shape, -jnp.inf, jnp.float32)], axis=1)
    narrowed = (slots.top_k > 0) | (slots.top_p < 1) | (slots.min_p > 0) | jnp.any(biased >= 0, axis=1)
    return Restrictions(narrowed & slots.active, slots.top_k, slots.top_p, slots.min_p, biased, biases)


def _tail_width(interruption: Interruption | None) -> int:
    return max(1, len(interruption.end_of_thinking)) if interruption else 1


def slot_shardings(per_slot: Any) -> tuple[Slots, Report]:
    """Slots and their report with the same sharding at every leaf."""
    slots, report = (dict.fromkeys(kind.__dataclass_fields__, per_slot) for kind in (Slots, Report))
    return Slots(**slots), Report(**report)
