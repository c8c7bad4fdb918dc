"""The training loop: groups in, versions out, everything recorded.

    worker.next_groups -> select -> pack -> train_step (dispatched) -> publish -> books -> record of the step before
                                                                                        -> evaluate, checkpoint when due

The loop knows no algorithm and no engine: it joins the parts it is given. Only it touches the TrainState.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax

from jaxrl_llm.metrics import RunLog
from jaxrl_llm.rollout.batching import StepGroups
from jaxrl_llm.rollout.exchange import WaitGivenUpError
from jaxrl_llm.rollout.issue import GroupIssuer
from jaxrl_llm.rollout.rows import RowShape, pack
from jaxrl_llm.rollout.statistics import describe_groups, measure_lag, sampled_tokens
from jaxrl_llm.rollout.worker import RolloutWorker
from jaxrl_llm.train.state import TrainState
from jaxrl_llm.types import EpisodeGroup, Params, RunFailedError, TrainBatch, WeightedSum

_STOPPED = "stopped by a signal; the same command goes on from here"


@dataclass
class Counters:
    """Totals over the whole run, kept in checkpoints. Compute counts training and sampling, not evaluation."""

    tokens_generated: int = 0
    tokens_trained: int = 0
    flops: float = 0.0
    device_seconds: float = 0.0
    wall_s: float = 0.0


@dataclass(frozen=True)
class Compute:
    """What tokens cost: FLOPs of trained and of sampled tokens, how many devices are busy, which of them train, and
    what one of those could do (FLOP/s; None where nobody knows)."""

    train_flops: Callable[[int], float]
    sample_flops: Callable[[int], float]
    devices: int
    trainers: tuple[jax.Device, ...]
    peak_flops: float | None


@dataclass(frozen=True)
class Parts:
    """Everything the loop joins. `evaluate(version, params)` returns an eval record."""

    train_step: Callable[[TrainState, TrainBatch], tuple[TrainState, Any]]
    select: Callable[[Sequence[EpisodeGroup]], StepGroups]
    row_shape: RowShape
    learning_rate: Callable[[int], float]
    worker: RolloutWorker
    issuer: GroupIssuer
    to_sampler: Callable[[Params], Params]
    evaluate: Callable[[int, Params], dict[str, Any]]
    sample_records: Callable[[int, Sequence[EpisodeGroup]], list[dict[str, Any]]]
    save: Callable[[int, TrainState, Mapping[str, Any]], None]
    log: RunLog
    compute: Compute
    on_step: Callable[[Mapping[str, Any]], None]
    on_evaluation: Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Schedule:
    """When things happen, in optimizer steps."""

    steps: int
    lag_bound: int
    eval_every: int
    checkpoint_every: int


@dataclass(frozen=True)
class Outcome:
    """How the loop ended: "finished", or "interrupted" with everything saved; `step` is the last one done."""

    state: str
    step: int
    message: str = ""


class _Laps:
    """Seconds of one step, split into parts that add up."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._mark = time.monotonic()

    def __call__(self, name: str) -> None:
        """What passed since the last call belongs to the part `name`."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._mark
        self._mark = now


def run_loop(
    state: TrainState,
    parts: Parts,
    schedule: Schedule,
    counters: Counters,
    *,
    start: int,
    stop_requested: Callable[[], bool],
) -> Outcome:
    """Train from step `start` to `schedule.steps`, or until `stop_requested` or no prompt is left.

    Raises RunFailedError when an update had to be refused, and whatever ended the sampling thread.
    """
    parts.worker.start()  # evaluation may be a matter of the same samplers
    try:
        if start == 0:
            _evaluate(parts, counters, 0, state.params)
        return _steps(state, parts, schedule, counters, start, stop_requested)
    except WaitGivenUpError:  # an evaluation's: its step is run again, so that none is missing
        return Outcome("interrupted", start, "stopped by a signal; the same command goes on from the last checkpoint")
    finally:
        parts.worker.stop()


def _steps(state, parts: Parts, schedule: Schedule, counters: Counters, start: int, stop_requested) -> Outcome:
    pending: tuple[dict[str, Any], Any] | None = None  # the last step's record, its device metrics not yet read
    mark = time.monotonic()  # steps share out the time between marks; evaluations and checkpoints are in none
    for step in range(start, schedule.steps):
        laps = _Laps()
        try:
            groups = parts.worker.next_groups()
        except WaitGivenUpError:
            _flush(parts, counters, pending)
            parts.save(step, state, asdict(counters))
            return Outcome("interrupted", step, _STOPPED)
        laps("trainer_wait_s")
        if not groups:
            _flush(parts, counters, pending)
            parts.save(step, state, asdict(counters))
            return Outcome("finished", step, "every training prompt is retired: the policy has mastered the set")
        lag = measure_lag(groups, version=step, bound=schedule.lag_bound)
        chosen = parts.select(groups)
        batch = pack(chosen.documents, parts.row_shape)
        laps("pack_s")
        state, metrics = parts.train_step(state, batch)
        laps("dispatch_s")

        version = step + 1
        parts.worker.publish(version, partial(parts.to_sampler, state.params))
        parts.issuer.settle(chosen.trained, chosen.dropped, groups)
        laps("publish_s")
        # The step before is read only now, so that the device never waits for the host's records.
        jax.block_until_ready(pending)
        laps("device_wait_s")
        _flush(parts, counters, pending)
        record = {
            "step": version,
            **describe_groups(groups),
            **lag,
            "groups": len(groups),
            "groups_zero_variance": chosen.equal_groups,
            "zero_variance": chosen.equal_groups / len(groups),
            **parts.issuer.counts(),
            "lr": parts.learning_rate(version),
            **parts.worker.report(groups),
            "positions_trained": sum(len(d.prompt_T) + len(d.completion_C) - 1 for d in chosen.documents),
            "sampled": sampled_tokens(groups),
        }
        for event in parts.worker.take_events():
            parts.log.event(event.kind, event.words, {"sampler": event.sampler, "group": event.group_id})
        last = version == schedule.steps
        stop = stop_requested()
        evaluate = last or version % schedule.eval_every == 0
        checkpoint = last or stop or version % schedule.checkpoint_every == 0
        if evaluate or checkpoint:
            laps("record_s")
            jax.block_until_ready(metrics)
            laps("device_wait_s")
        laps("record_s")
        now = time.monotonic()
        record |= laps.seconds | {"step_s": now - mark}
        mark = now
        pending = record, metrics
        if evaluate or checkpoint:
            _flush(parts, counters, pending)
            pending = None
        if evaluate:
            parts.log.samples(parts.sample_records(version, groups))
            _evaluate(parts, counters, version, state.params)
        if checkpoint:
            parts.save(version, state, asdict(counters))
        if evaluate or checkpoint:
            mark = time.monotonic()
        if stop and not last:
            return Outcome("interrupted", version, _STOPPED)
    return Outcome("finished", schedule.steps)


def _flush(parts: Parts, counters: Counters, pending: tuple[dict[str, Any], Any] | None) -> None:
    """Read the step's metrics from the device (which waits for it), add up the totals, write the record."""
    if pending is None:
        return
    record, device_metrics = pending
    metrics = {name: plain(value) for name, value in jax.device_get(device_metrics).items()}
    if metrics["skipped"]:
        raise RunFailedError(
            f"step {record['step']}: the loss or the gradient is not finite, so its update was not applied; "
            "the last checkpoint is unharmed. Lower optimizer.lr or set optimizer.clip_norm"
        )
    step_s = record["step_s"]
    prompt_tokens, generated = record.pop("sampled")
    counters.tokens_generated += generated
    counters.tokens_trained += int(metrics["tokens_trained"])
    positions = record.pop("positions_trained")
    trained_flops = parts.compute.train_flops(positions)
    counters.flops += trained_flops
    counters.flops += parts.compute.sample_flops(prompt_tokens + generated)
    counters.wall_s += step_s
    counters.device_seconds += step_s * parts.compute.devices
    record |= metrics | asdict(counters) | {"tokens_per_s": generated / step_s}
    record |= {"trainer_tokens_per_s": positions / step_s, "mfu": utilisation(parts.compute, trained_flops / step_s)}
    record |= hbm_peak(parts.compute.trainers)
    parts.log.step(record)
    parts.on_step(record)


def utilisation(compute: Compute, flops_per_s: float) -> float | None:
    """Share of the trainer's devices' peak that went into training, waits included (arXiv:2204.02311)."""
    return None if compute.peak_flops is None else flops_per_s / (compute.peak_flops * len(compute.trainers))


def hbm_peak(devices: Iterable[jax.Device]) -> dict[str, int]:
    """The most bytes that any of this process's `devices` has held at once, for the record; no key where the backend
    does not say."""
    here = [device for device in devices if device.process_index == jax.process_index()]
    found = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in here]
    known = [peak for peak in found if peak is not None]
    return {"hbm_peak_bytes": max(known)} if known else {}


def plain(value: Any) -> float:
    """A metric as a plain number; a mean over nothing is NaN, which the record shows as null."""
    if isinstance(value, WeightedSum):
        return float(value.total / value.weight) if value.weight else float("nan")
    return float(value)


def _evaluate(parts: Parts, counters: Counters, version: int, params: Params) -> None:
    record = {
        "step": version,
        "version": version,
        **parts.evaluate(version, params),
        "flops": counters.flops,
        "tokens": counters.tokens_generated,
        "device_seconds": counters.device_seconds,
        "wall_s": counters.wall_s,
    }
    parts.log.evaluation(record)
    parts.on_evaluation(record)
