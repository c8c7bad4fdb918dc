"""`jaxrl passrate` and `jaxrl eval`: completions of many prompts, recorded prompt by prompt, so that both resume."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_llm.cli.assemble import answer_environment
from jaxrl_llm.cli.join import how_to_sample
from jaxrl_llm.cli.policy import Policy
from jaxrl_llm.cli.tasks import encoded, heldout_tasks
from jaxrl_llm.cli.tools import bound_tools
from jaxrl_llm.config import RunConfig
from jaxrl_llm.data.prompts import fingerprint
from jaxrl_llm.data.sources import load_sources
from jaxrl_llm.envs.single_turn import SingleTurn
from jaxrl_llm.metrics import lock_run, read_records, write_json
from jaxrl_llm.rewards.exact import normalised
from jaxrl_llm.rewards.extract import final_answer
from jaxrl_llm.rollout.play import play
from jaxrl_llm.scaling.at_k import maj_at_k, mean_interval, pass_at_k, worst_at_k
from jaxrl_llm.types import Completion, EpisodeGroup, PromptTask, SampleRequest, Sampling, UserError

Say = Callable[[str], Any]

# Pass rates draw with evaluation's seed from streams of their own, so that they repeat no sample of a run.
_PASS_RATE_STREAM = 2**31


@dataclass(frozen=True)
class _Plan:
    """What is sampled, how often, and how."""

    tasks: list[PromptTask]
    samples: int
    sampling: Sampling
    seed: int
    first_stream: int = 0

    def header(self, policy: Policy) -> dict[str, Any]:
        """What results must have in common to be continued."""
        return {
            "weights": policy.origin,
            "tokenizer": policy.setup.tokenizer.fingerprint,
            "data": fingerprint(self.tasks),
            "samples": self.samples,
            "sampling": repr(self.sampling),
            "tools": repr(policy.setup.config.rollout.tools) if self.sampling.stop_strings else None,
            "seed": self.seed,
        }


def measure_pass_rates(policy: Policy, path: Path, *, samples: int, say: Say) -> None:
    """Write {"task_id", "right", "total"} of every training prompt to `path`, or go on where it ends.

    Completions whose reward failed count neither as right nor in the total. Raises UserError if `path` was measured
    otherwise, and if no completion of a prompt could be scored.
    """
    config = policy.setup.config
    sources = load_sources(config.data.sources, seed=config.data.seed, overlap=config.data.overlap)
    tasks = [task for source in encoded(config, policy.setup.tokenizer, sources) for task in source.train]
    how = how_to_sample(config)
    plan = _Plan(tasks, samples, how.training, how.evaluation_seed, _PASS_RATE_STREAM)

    def record(group: EpisodeGroup, _: SingleTurn) -> dict[str, Any]:
        rewards = [episode.reward for episode in group.episodes if episode.reward.failed is None]
        if not rewards:
            raise UserError(f"no completion of {group.task.task_id} could be scored: {group.episodes[0].reward.failed}")
        right = sum(reward.parts["correct"] > 0 for reward in rewards)
        return {"task_id": group.task.task_id, "right": right, "total": len(rewards)}

    path.parent.mkdir(parents=True, exist_ok=True)
    records = _measure(policy, config, plan, path, record, say)
    mean = sum(r["right"] / r["total"] for r in records) / len(records)
    say(f"{path}: {len(records)} prompts, Avg@{samples} {mean:.4f}")


def evaluate_checkpoint(
    policy: Policy, config: RunConfig, out: Path, *, samples: int | None, ks: Sequence[int], say: Say
) -> dict[str, Any]:
    """Metrics at each of `ks` of the held-out prompts of `config`, by source and over all; OUT/result.json.

    OUT/samples.jsonl has a line for each prompt; a second call goes on where it ends. Raises UserError if OUT belongs
    to another evaluation.
    """
    sources = load_sources(config.data.sources, seed=config.data.seed, overlap=config.data.overlap)
    tasks = heldout_tasks(config, encoded(config, policy.setup.tokenizer, sources))
    samples = samples or config.eval.samples
    ks = sorted(set(ks)) or [k for k in (1, 2, 4, 8, 16, 32, 64, 128, 256) if k < samples] + [samples]
    if ks[0] < 1 or ks[-1] > samples:
        raise UserError(f"--k {ks[0] if ks[0] < 1 else ks[-1]} is not between 1 and the {samples} samples of a prompt")
    how = how_to_sample(config)
    plan = _Plan(tasks, samples, how.evaluation, how.evaluation_seed)
    lock = lock_run(out)
    try:
        records = _measure(policy, config, plan, out / "samples.jsonl", _sample_record, say)
    finally:
        lock.close()
    names = list(dict.fromkeys(record["source"] for record in records))
    parts = {name: [record for record in records if record["source"] == name] for name in names}
    result = {
        "weights": policy.origin,
        "samples": samples,
        "ks": ks,
        "temperature": how.evaluation.temperature,
        "tasks": {name: _metrics(part, samples, ks, config.seed) for name, part in parts.items()},
        "all": _metrics(records, samples, ks, config.seed),
    }
    write_json(out / "result.json", result)
    return result


def _sample_record(group: EpisodeGroup, environment: SingleTurn) -> dict[str, Any]:
    """One prompt's line. `right` is null where no reward could be computed."""
    texts = [environment.text(episode.completion) for episode in group.episodes]
    return {
        "task_id": group.task.task_id,
        "source": group.task.source,
        "right": [_right(episode.reward) for episode in group.episodes],
        "votes": [_vote(text, e.completion, group.task) for text, e in zip(texts, group.episodes, strict=True)],
        "finish": [episode.completion.finish for episode in group.episodes],
        "texts": [environment.transcript(episode.completion) for episode in group.episodes],
    }


def _right(reward) -> bool | None:
    return None if reward.failed is not None else reward.parts["correct"] > 0


def _vote(text: str, completion: Completion, task: PromptTask) -> str | None:
    """What a completion votes for: the answer its task's reward would read; None for a truncated one, or for none."""
    if completion.finish == "length":
        return None
    if task.reward == "math":
        return final_answer(text)
    return normalised(text) if task.reward == "normalised" else text.strip()


def _metrics(records: Sequence[dict[str, Any]], samples: int, ks: Sequence[int], seed: int) -> dict[str, Any]:
    """Each metric as {value, low, high}; a prompt of which fewer than k completions were scored is in none at k."""
    scored = [
        [(right, vote) for right, vote in zip(r["right"], r["votes"], strict=True) if right is not None]
        for r in records
    ]
    finishes = [finish for record in records for finish in record["finish"]]
    found: dict[str, Any] = {
        "prompts": len(records),
        "failed": sum(samples - len(one) for one in scored),
        "truncation_rate": finishes.count("length") / len(finishes),
    }

    def put(name: str, values: Sequence[float]) -> None:
        if values:
            found[name] = dict(zip(("value", "low", "high"), mean_interval(values, seed=seed), strict=True))

    put(f"avg@{samples}", [sum(right for right, _ in one) / len(one) for one in scored if one])
    for k in ks:
        able = [one for one in scored if len(one) >= k]
        counts = [(sum(right for right, _ in one), len(one)) for one in able]
        put(f"pass@{k}", [pass_at_k(right, n, k) for right, n in counts])
        put(f"best@{k}", [pass_at_k(right, n, k) for right, n in counts])
        put(f"worst@{k}", [worst_at_k(right, n, k) for right, n in counts])
        put(f"maj@{k}", [maj_at_k([v for _, v in one], [r for r, _ in one], k, seed=seed) for one in able])
    return found


def _measure(
    policy: Policy,
    config: RunConfig,
    plan: _Plan,
    path: Path,
    record: Callable[[EpisodeGroup, SingleTurn], dict[str, Any]],
    say: Say,
) -> list[dict[str, Any]]:
    """A record of every task, in order: those that `path` holds already, then new ones, written as they come."""
    header = {"measured": plan.header(policy)}
    kept = read_records(path)
    if kept and (other := _difference(kept[0][1], header)):
        raise UserError(f"{path} was measured with another {other}; name another place, or remove it")
    done = [found for _, found in kept[1:]]
    if [found["task_id"] for found in done] != [task.task_id for task in plan.tasks[: len(done)]]:
        raise UserError(f"{path} does not hold the first prompts in their order; it was edited, remove it")
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(line for line, _ in kept) or json.dumps(header) + "\n")
    temporary.replace(path)  # without a last line cut short by a kill
    if done:
        say(f"{path} has {len(done)} of {len(plan.tasks)} prompts already")
    environment, workers = answer_environment(config, policy.setup.tokenizer)
    try:
        workers.start()
        with path.open("a") as file:
            for group in _groups(policy, plan, environment, start=len(done)):
                done.append(record(group, environment))
                file.write(json.dumps(done[-1], allow_nan=False) + "\n")
                file.flush()
    finally:
        workers.close()
    return done


def _groups(policy: Policy, plan: _Plan, environment: SingleTurn, *, start: int) -> Iterator[EpisodeGroup]:
    """The scored groups of the tasks from `start` on. A completion depends on the seed and its prompt's place alone."""
    config = policy.setup.config
    together = max(1, 4 * config.sampler.slots // plan.samples)
    scheduler, tools = policy.scheduler(), bound_tools(environment, config.rollout)
    for first in range(start, len(plan.tasks), together):
        tasks = plan.tasks[first : first + together]
        requests = [
            SampleRequest(task.tokens_T, plan.sampling, plan.seed, plan.first_stream + first + place, sibling)
            for place, task in enumerate(tasks)
            for sibling in range(plan.samples)
        ]
        completions = play(scheduler, requests, [task for task in tasks for _ in range(plan.samples)], tools)
        for place, task in enumerate(tasks):
            siblings = [completions[place * plan.samples + sibling] for sibling in range(plan.samples)]
            yield EpisodeGroup(first + place, task, tuple(environment.episodes(task, siblings)))


def _difference(theirs: dict[str, Any], ours: dict[str, Any]) -> str | None:
    """The first of the header's facts that is another."""
    told, wanted = theirs.get("measured"), ours["measured"]
    if not isinstance(told, dict):
        return "command"
    return next(
        (f"{name} ({told.get(name)} -> {wanted[name]})" for name in wanted if told.get(name) != wanted[name]), None
    )
