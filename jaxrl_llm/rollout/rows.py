"""Documents in fixed rows: packing, the one shift, and prompts that the siblings of a group share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxrl_llm.data.packing import first_fit, rows_needed, shared_fit
from jaxrl_llm.types import Reach, TrainBatch


@dataclass(frozen=True)
class Document:
    """One prompt and completion about to be packed. The arrays that end in _C have the completion's length C."""

    prompt_T: np.ndarray
    completion_C: np.ndarray
    weights_C: np.ndarray  # token weights, 0 where nothing is trained
    advantages_C: np.ndarray
    logprobs_C: np.ndarray  # from the sampler
    score: float = 0.0  # the completion's reward
    number: int = 0  # 1 + group * siblings + sibling within the update
    update: int = 0  # which of the step's updates trains it


@dataclass(frozen=True)
class RowShape:
    """The fixed shape of a packed batch: [microbatches, rows, length], how many updates have one each, whether
    completions of one prompt in one row share it, and how far its documents may reach (None: as far as a row)."""

    microbatches: int
    rows: int
    length: int
    updates: int = 1
    share_prompts: bool = False
    reach: Reach | None = None


def row_shape(
    *,
    documents: int,
    prompt: int,
    completion: int,
    length: int,
    rows: int,
    updates: int = 1,
    share_prompts: bool = False,
) -> RowShape:
    """The smallest shape that always holds `documents` documents of at most `prompt` + `completion` tokens in every
    update."""
    longest = prompt + completion - 1
    reach = Reach(own=completion, shared=prompt - 1) if share_prompts else Reach(own=longest)
    microbatches = -(-rows_needed(documents, longest, length) // rows)
    return RowShape(microbatches, rows, length, updates, share_prompts, reach)


def pack(documents: Sequence[Document], shape: RowShape) -> TrainBatch:
    """Documents in rows, shifted once: every [M, B, T] field speaks about `targets`.

    A document of n tokens takes n - 1 places: its last token is nobody's input and its first is nobody's target.
    Several updates stand one behind the other on a first axis K.

    Where prompts are shared, a prompt of P tokens puts its first P - 1 into a row once, as a segment without targets;
    each of its completions there starts with its own copy of the last prompt token, whose target is its first token.
    `prefix_ids` tells a completion's tokens the prompt's segment, which they attend to beside their own.

    Raises ValueError for a document that reaches further than the shape says, or fits no row.
    """
    if shape.updates == 1:
        return _pack_one(documents, shape)
    parts = [
        _pack_one([document for document in documents if document.update == update], shape)
        for update in range(shape.updates)
    ]
    return jax.tree.map(lambda *arrays: np.stack(arrays), *parts)


@dataclass(frozen=True)
class _Place:
    """Where a document's own tokens go; `prefix` is where its shared prompt stands in that row, and -1 alone."""

    row: int
    start: int
    prefix: int = -1


def _places(documents: Sequence[Document], shape: RowShape) -> list[_Place]:
    if not shape.share_prompts:
        lengths = [len(d.prompt_T) + len(d.completion_C) - 1 for d in documents]
        _check_reach(shape.reach, lengths, [])
        return [_Place(row, start) for row, start in first_fit(lengths, shape.length)]
    prompts = [d.prompt_T.tobytes() for d in documents]
    shared = [len(d.prompt_T) - 1 for d in documents]
    own = [len(d.completion_C) for d in documents]
    _check_reach(shape.reach, own, shared)
    return [_Place(*place) for place in shared_fit(prompts, shared, own, shape.length)]


def _check_reach(reach: Reach | None, own: list[int], shared: list[int]) -> None:
    # Attention leaves out what lies further: it would be wrong and nobody would see it.
    if reach is not None and (max(own, default=0) > reach.own or max(shared, default=0) > reach.shared):
        most = f"{max(own)} tokens of its own and {max(shared, default=0)} shared"
        raise ValueError(f"a document has up to {most}; rows were made for {reach}")


def _pack_one(documents: Sequence[Document], shape: RowShape) -> TrainBatch:
    size = (shape.microbatches * shape.rows, shape.length)
    names = ("tokens", "targets", "positions", "segment_ids", "completions", "prefix_ids")
    ints = {name: np.zeros(size, np.int32) for name in names}
    floats = {
        name: np.zeros(size, np.float32) for name in ("token_weights", "advantages", "behavior_logprobs", "scores")
    }
    places = _places(documents, shape)
    segments = np.zeros(size[0], np.int32)
    prefixes: dict[tuple[int, int], int] = {}
    for document, place in zip(documents, places, strict=True):
        row, first = place.row, 0
        ids = np.concatenate([document.prompt_T, document.completion_C])
        if place.prefix >= 0:
            first = len(document.prompt_T) - 1
            if (row, place.prefix) not in prefixes:
                segments[row] += 1
                prefixes[row, place.prefix] = segments[row]
                shared = slice(place.prefix, place.prefix + first)
                ints["tokens"][row, shared] = ids[:first]
                ints["positions"][row, shared] = np.arange(first)
                ints["segment_ids"][row, shared] = segments[row]
        end = place.start + len(ids) - 1 - first
        own = slice(place.start, end)
        segments[row] += 1
        ints["tokens"][row, own] = ids[first:-1]
        ints["targets"][row, own] = ids[first + 1 :]
        ints["positions"][row, own] = np.arange(first, len(ids) - 1)
        ints["segment_ids"][row, own] = segments[row]
        ints["prefix_ids"][row, own] = prefixes.get((row, place.prefix), 0)
        sampled = slice(end - len(document.completion_C), end)
        floats["token_weights"][row, sampled] = document.weights_C
        floats["advantages"][row, sampled] = document.advantages_C
        floats["behavior_logprobs"][row, sampled] = document.logprobs_C
        floats["scores"][row, sampled] = document.score
        ints["completions"][row, sampled] = document.number
    used = max((place.row for place in places), default=-1) + 1
    fields: dict[str, Any] = {
        name: array.reshape(shape.microbatches, shape.rows, shape.length) for name, array in (ints | floats).items()
    }
    if not shape.share_prompts:
        del fields["prefix_ids"]
    fields["microbatches"] = np.int32(-(-used // shape.rows))
    return TrainBatch(**fields)
