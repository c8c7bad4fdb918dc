"""How fast a run would be: the same simulation without faults, with what steps and tokens cost.

Costs are measured on some chips and scaled: the part of a training step that grows with its tokens is divided by the
trainer's chips, and every `sampler_chips` chips are one sampler. What does not scale like that (a larger mesh's
communication) is not foreseen; measure costs near the size that is planned for.
"""

import dataclasses
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.pipeline.network import SteadyNetwork
from jaxrl_llm.pipeline.schedules import selection
from jaxrl_llm.pipeline.simulation import RunSpec, SamplerSpec, Simulation
from jaxrl_llm.rollout.coordinator import Coordinator, Order
from jaxrl_llm.rollout.issue import GroupIssuer
from jaxrl_llm.rollout.lag import LagRule
from jaxrl_llm.types import UserError

_UNITS = 48  # a completion is simulated in blocks of tokens, the longest in so many


@dataclass(frozen=True)
class Costs:
    """Seconds, and a sample of completion lengths in tokens.

    A training step takes `train_step_s` + `train_token_chip_s` x tokens / chips, the tokens being those trained and
    their prompts (`prompt_tokens` each); `host_s` is what the trainer does between two steps. A decode step of n
    sequences on `sampler_chips` chips takes `decode_step_s` + `decode_sequence_s` x n, a prompt `prefill_s`; the
    rewards of a group take `score_s`, and a version is with a sampler `push_s` after it was made.
    `overlap_train` and `overlap_sample` are how much slower the trainer (its host's part too) and the sampler are while
    both work, because they share a processor (1: they do not). The share `trained_share` of groups is trained (the
    others' rewards are equal).
    """

    train_token_chip_s: float
    decode_step_s: float
    lengths: tuple[float, ...]
    train_step_s: float = 0.0
    host_s: float = 0.0
    decode_sequence_s: float = 0.0
    prefill_s: float = 0.0
    score_s: float = 0.0
    push_s: float = 0.0
    overlap_train: float = 1.0
    overlap_sample: float = 1.0
    sampler_chips: int = 1
    prompt_tokens: float = 0.0
    trained_share: float = 1.0


def read_costs(path: Path) -> Costs:
    """Costs from a JSON object of the fields above. Raises UserError for what is missing, unknown or no number."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"costs file {path} cannot be read ({error})") from None
    names = {field.name: field for field in dataclasses.fields(Costs)}
    needed = {name for name, field in names.items() if field.default is dataclasses.MISSING}
    if not isinstance(found, dict):
        raise UserError(f"costs file {path} is not a JSON object; it needs {', '.join(sorted(needed))}")
    if unknown := sorted(found.keys() - names.keys()):
        raise UserError(f"costs file {path} has {unknown[0]!r}; it may have {', '.join(sorted(names))}")
    if missing := sorted(needed - found.keys()):
        raise UserError(f"costs file {path} lacks {missing[0]!r}; it needs {', '.join(sorted(needed))}")
    lengths = found.pop("lengths")
    if not (isinstance(lengths, list) and lengths and all(_number(n) and n >= 1 for n in lengths)):
        raise UserError(f"costs file {path}: lengths is no list of token counts, each at least 1")
    for name, value in found.items():
        least = {"overlap_train": 1, "overlap_sample": 1, "sampler_chips": 1}.get(name, 0)
        if not (_number(value) and value >= least):
            raise UserError(f"costs file {path}: {name} = {value!r} is no number of at least {least}")
    if found["decode_step_s"] + found.get("decode_sequence_s", 0) <= 0:
        raise UserError(f"costs file {path}: a decode step takes no time; set decode_step_s")
    return Costs(lengths=tuple(lengths), **(found | {"sampler_chips": int(found.get("sampler_chips", 1))}))


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class Plan:
    """What is planned: the run's sizes (keys of rollout.* and sampler.* by their names), and whether the sampler lives
    in the trainer's process."""

    rule: LagRule
    prompts_per_step: int
    group_size: int
    slots: int
    decode_steps: int
    order: Order = "issue"
    ready_batches: int = 1
    local: bool = False


def predict(
    plan: Plan, costs: Costs, *, trainer_chips: int, samplers: int, steps: int = 40, seed: int = 0
) -> dict[str, Any]:
    """Throughput, idle shares and lag of `steps` simulated steps, of which the first fourth is not counted.

    `trainer_idle` and `sampler_idle` are shares of time without a step, and of slot time without a sequence.
    """
    rng = random.Random(seed)
    block = max(1.0, max(costs.lengths) / _UNITS)
    drawn: dict[tuple[int, int], float] = {}
    simulation: Simulation | None = None

    def tokens(stream: int, sibling: int) -> float:
        if (stream, sibling) not in drawn:
            drawn[stream, sibling] = rng.choice(costs.lengths)
        return drawn[stream, sibling]

    def decode_s(running: int) -> float:
        each = costs.decode_step_s + costs.decode_sequence_s * running
        shared = simulation is not None and simulation.trainer.busy
        return block * each * (costs.overlap_sample if shared else 1.0)

    def train_s(units: int, documents: int) -> float:
        assert simulation is not None
        positions = units * block + costs.prompt_tokens * documents
        device_s = costs.train_step_s + costs.train_token_chip_s * positions / trainer_chips
        shared = any(host.busy for host in simulation.hosts)
        return (costs.host_s + device_s) * (costs.overlap_train if shared else 1.0)

    def coordinator(issuer: GroupIssuer, step: int) -> Coordinator:
        return Coordinator(
            issuer,
            plan.rule,
            prompts_per_step=plan.prompts_per_step,
            group_size=plan.group_size,
            step=step,
            order=plan.order,
            max_ready=plan.ready_batches * plan.prompts_per_step if plan.rule.mode == "pipeline" else None,
        )

    sampler = SamplerSpec(
        slots=plan.slots,
        chunk=max(1, round(plan.decode_steps / block)),
        step_s=decode_s,
        prefill_s=costs.prefill_s / plan.group_size,
    )
    spec = RunSpec(
        steps=steps,
        prompts_per_step=plan.prompts_per_step,
        group_size=plan.group_size,
        coordinator=coordinator,
        samplers=[sampler] * samplers,
        length=lambda stream, sibling: max(1, math.ceil(tokens(stream, sibling) / block)),
        reward=lambda group_id, sibling: float(sibling % 2 and group_id % 100 < 100 * costs.trained_share),
        train_s=train_s,
        selection=selection(plan.group_size),
        score_s=costs.score_s,
        local=plan.local,
        checkpoint_every=steps,
    )
    simulation = Simulation(spec, SteadyNetwork(message_s=0.0, push_s=costs.push_s))
    simulation.run(max_events=10_000 * steps * max(1, samplers))
    return _described(simulation, block, first=steps // 4)


def _described(simulation: Simulation, block: float, *, first: int) -> dict[str, Any]:
    records = simulation.records
    counted = records[first:]
    seconds = counted[-1]["at_s"] - records[first - 1]["at_s"] if first else counted[-1]["at_s"]
    busy = sum(record["train_s"] for record in counted)
    return {
        "step_s": seconds / len(counted),
        "completion_tokens_per_s": block * sum(record["tokens"] for record in counted) / seconds,
        "trainer_idle": max(0.0, 1 - busy / seconds),
        "sampler_idle": float(np.mean([record["sampler_idle"] for record in counted])),
        "lag_mean": float(np.mean([record["lag_mean"] for record in counted])),
        "lag_max": max(record["lag_max"] for record in counted),
        "trainer_waits_s": _total(record["trainer_waits_s"] for record in counted),
        "sampler_waits_s": _total(record["sampler_waits_s"] for record in counted),
    }


def _total(parts) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, seconds in part.items():
            total[name] = total.get(name, 0.0) + seconds
    return total


def splits(plan: Plan, costs: Costs, *, chips: int, trainer_multiple: int = 1, steps: int = 40) -> list[dict[str, Any]]:
    """A prediction for every number of samplers that `chips` have room for, the fastest first.

    The trainer gets what is left, a multiple of `trainer_multiple`; chips beyond that stand idle. Raises UserError if
    there is no room for one of each.
    """
    rows = []
    for samplers in range(1, chips // costs.sampler_chips + 1):
        trainer = (chips - samplers * costs.sampler_chips) // trainer_multiple * trainer_multiple
        if trainer:
            found = predict(plan, costs, trainer_chips=trainer, samplers=samplers, steps=steps)
            rows.append({"trainer_chips": trainer, "samplers": samplers, **found})
    if not rows:
        raise UserError(
            f"{chips} chips hold no trainer of {trainer_multiple} beside a sampler of {costs.sampler_chips}; give more"
        )
    return sorted(rows, key=lambda row: row["step_s"])


def compare_modes(rules: Sequence[LagRule], plan: Plan, costs: Costs, **how: Any) -> list[dict[str, Any]]:
    """`predict` for several rules, each with its throughput over the first one's."""
    found = [predict(dataclasses.replace(plan, rule=rule), costs, **how) for rule in rules]
    return [
        {"mode": rule.mode, "k": rule.k, "speed": found[0]["step_s"] / row["step_s"], **row}
        for rule, row in zip(rules, found, strict=True)
    ]
