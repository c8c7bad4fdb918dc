"""The types at the borders between rooms, nothing else.

Legend for the suffix of a name: B rows, T tokens, P prompts, G siblings of one prompt, N flat tokens, D model width,
H query heads, K key/value heads, C head width, F feed-forward width, V vocabulary, S decode slots, M microbatches.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import flax.struct
import numpy as np
from jax import Array

Params = Any
"""A pytree (nested dict) of arrays: the weights of a policy."""

FinishReason = Literal["stop", "stop_string", "length", "repetition", "aborted"]
"""Why a completion ended: its last token is the end-of-sequence id or one of the request's stop ids; its text holds a
stop string; its budget is used up; the policy repeats itself; somebody asked."""


class UserError(ValueError):
    """Something the user can put right: the message names the value, the place and the way out.

    The command line prints it as one line and exits with status 2.
    """


class RunFailedError(RuntimeError):
    """A run that cannot go on; what it has produced is kept. The command line exits with status 1."""


@dataclass(frozen=True)
class PromptTask:
    """One prompt and what its reward needs to know.

    `task_id` is "<source>/<id>", unique over all sources and stable; `tokens_T` (int32 [T]) is exactly what the policy
    is given, `prompt` the same as text without the chat template. `reward` names what scores it by `answer`. `gold` is
    a completion that is right, word for word, or None where none is known.
    """

    task_id: str
    tokens_T: np.ndarray
    prompt: str
    answer: str
    source: str
    reward: str
    gold: str | None = None


class QueueFullError(RuntimeError):
    """The sampler's queue holds as many requests as it may; nothing of the call was queued. Try again later."""


@dataclass(frozen=True)
class ThinkingBudget:
    """Forced interruption (ScaleRL): how long a completion may think, and how long it may answer.

    A budget is drawn uniformly from `lowest` ... `highest` tokens with the request's own key. A completion that has
    not ended its thinking by then is made to: the engine's interruption phrase follows, token by token. From the end
    of thinking, forced or not, `answer_tokens` more may come.
    """

    lowest: int
    highest: int
    answer_tokens: int


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one completion are chosen.

    Temperature 0 is greedy. `top_k` (0 is off), `top_p` (1 is off) and `min_p` (0 is off) are applied in this order
    after temperature; `banned_ids` are never drawn; the end-of-sequence id and `stop_ids` not before `min_new_tokens`;
    `logit_bias` adds a number to the logit of an id, before temperature. None of these changes a log-probability: those
    are the policy's own, over the full vocabulary. `repetition_limit` ends a completion
    after so many consecutive tokens of probability above .99 (MiniMax-M1 uses 3,000); 0 is off.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    min_new_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    banned_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    thinking: ThinkingBudget | None = None
    repetition_limit: int = 0


@dataclass(frozen=True)
class SampleRequest:
    """One completion asked of the sampler.

    The random key of its n-th token is fold(seed, stream, sibling, n), so that the same numbers replay the same
    completion whatever the slot, the order of arrival or the neighbours. `first` is the n of the first token: a request
    that goes on where another ended draws as that one would have. `alternatives` and `score_prompt` ask for more
    about the tokens and change none of them: the likeliest so many at every place of the completion, and the prompt's
    own log-probabilities (with as many alternatives).
    """

    tokens_T: np.ndarray
    sampling: Sampling
    seed: int = 0
    stream: int = 0
    sibling: int = 0
    alternatives: int = 0
    score_prompt: bool = False
    first: int = 0


@dataclass(frozen=True)
class Alternatives:
    """The likeliest tokens at each of T places, the likeliest first: int32 and float32 [T, N].

    Log-probabilities are of the same distribution as that of the token that stands at the place.
    """

    ids_TN: np.ndarray
    logprobs_TN: np.ndarray


@dataclass(frozen=True)
class PromptScores:
    """How likely a prompt's tokens were, from the second on: each given those before it, at temperature 1.

    `logprobs_T` is float32 [T - 1] for a prompt of T tokens, over the full vocabulary.
    """

    logprobs_T: np.ndarray
    alternatives: Alternatives


@dataclass(frozen=True)
class Completion:
    """What the sampler made of one request; every array has the completion's length.

    `tokens_T` int32 ends with the end-of-sequence token (or a stop id) if and only if `finish` is "stop".
    `logprobs_T` float32 is the log-probability of each token under the weights **and temperature** that sampled it
    (temperature 1 where it is greedy), over the full vocabulary. `versions_T` int32 is the version of those weights,
    token by token. `forced_T` bool marks tokens the system put there (an interruption, what a tool answered); nobody
    trains on them. `alternatives` and `prompt` are what the request asked for beyond that. The prompt was scored by the
    weights of the first token.

    An episode of several turns is one completion too: `turns` says where those after the first begin, each behind what
    a tool answered. Those tokens have the version of the token before them and the log-probability 0, which says
    nothing. `failed` says why a tool could not be asked: such an episode has no reward.
    """

    tokens_T: np.ndarray
    logprobs_T: np.ndarray
    versions_T: np.ndarray
    forced_T: np.ndarray
    finish: FinishReason
    alternatives: Alternatives | None = None
    prompt: PromptScores | None = None
    turns: tuple[int, ...] = ()
    failed: str | None = None


@dataclass(frozen=True)
class Turn:
    """An episode so far, and how many tokens the policy may add to it at once; 0: it is over."""

    completion: Completion
    more: int = 0


@dataclass(frozen=True)
class Reward:
    """`value` is the scalar that trains; `parts` are its named components.

    `failed` says why no reward could be computed (a judge that broke); such a sample is dropped, never scored 0.
    """

    value: float
    parts: Mapping[str, float]
    failed: str | None = None


@dataclass(frozen=True)
class Episode:
    """One prompt, one completion, one reward. `trainable_T` bool marks the completion's tokens the policy chose."""

    completion: Completion
    trainable_T: np.ndarray
    reward: Reward


@dataclass(frozen=True)
class EpisodeGroup:
    """The G siblings of one issue of one prompt. `group_id` counts issues, so a prompt met again has a new id."""

    group_id: int
    task: PromptTask
    episodes: tuple[Episode, ...]


@dataclass(frozen=True)
class Reach:
    """How far a token of a packed row can look at most: `own` places of its own document, itself included, and `shared`
    places of a prompt that documents share, which stands before the first of them with nothing foreign between.

    A prompt that is shared may be longer than `own`.
    """

    own: int
    shared: int = 0


@flax.struct.dataclass
class TrainBatch:
    """Packed rows of one optimizer step, split into microbatches: every array is [M, B, T].

    Each field speaks about `targets`, shifted once on the host: tokens[..., t] predicts targets[..., t]. A document
    (prompt plus completion) has one segment id >= 1; 0 is padding. `token_weights` holds the aggregation (global
    denominators included) and is 0 wherever nothing is trained, so the loss is a plain weighted sum.

    Several updates in one step put one more axis K in front of every array; each update is then one optimizer batch.
    `scores` and `completions` are read where advantages are worked out on the device, and may be None elsewhere.
    `prefix_ids` is None where no prompts are shared.
    """

    tokens: Array  # int32
    targets: Array  # int32
    positions: Array  # int32, position inside the document
    segment_ids: Array  # int32
    token_weights: Array  # float32
    advantages: Array  # float32
    behavior_logprobs: Array  # float32, from the sampler
    microbatches: Array  # int32 [], how many of the M microbatches hold anything
    scores: Array | None = None  # float32, the completion's reward at each of its tokens
    completions: Array | None = None  # int32, 1 + group * siblings + sibling of the completion, 0 elsewhere
    prefix_ids: Array | None = None  # int32, the segment of the row that holds the prompt shared by this one, or 0


@flax.struct.dataclass
class WeightedSum:
    """A mean kept as its numerator and denominator, so that parts of a batch add up exactly."""

    total: Array  # float32 []
    weight: Array  # float32 []

    def __add__(self, other: "WeightedSum") -> "WeightedSum":
        return WeightedSum(self.total + other.total, self.weight + other.weight)


@dataclass(frozen=True)
class PolicyWeights:
    """One version of the policy. The version is a host integer: as a static jit argument it would recompile."""

    version: int
    params: Params


@dataclass(frozen=True)
class RunPoint:
    """One evaluation of a run, with the compute spent to reach it (training and sampling; evaluation left out)."""

    step: int
    flops: float
    tokens: int
    device_seconds: float
    metric: float
