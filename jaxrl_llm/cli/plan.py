"""`jaxrl plan`: how to spend a budget, from laws fitted to a table or from published constants."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import typer

from jaxrl_llm.cli.curves import write_objects
from jaxrl_llm.models.flops import peak_flops
from jaxrl_llm.scaling.accounting import StepCost, device_hours, rl_step
from jaxrl_llm.scaling.files import read_table
from jaxrl_llm.scaling.fitted import finite
from jaxrl_llm.scaling.law_data import fit_law
from jaxrl_llm.scaling.planning import (
    RolloutPlan,
    fit_sweep,
    isoflop_table,
    plan_published_rollouts,
    plan_rollouts,
    pretraining_split,
    published_pretraining,
    size_plan,
)
from jaxrl_llm.types import UserError

_LAWS = ("chinchilla", "kaplan_ND", "tan", "isocompute")


@dataclass(frozen=True)
class PlanOptions:
    """What the command line asks for; see `jaxrl plan --help`."""

    law: str
    x: str | None
    y: str | None
    group: str | None
    sizes: Sequence[float]
    unit: str
    prompts: int
    difficulty: str
    width: float
    margin: float
    lower: float
    upper: float
    params: float | None
    prompt_tokens: float
    completion_tokens: float | None
    device: str | None
    peak: float | None
    utilisation: float
    json: str | None


def plan_budget(budget: float, table: Path | None, options: PlanOptions) -> None:
    """Plan, print or write."""
    if options.law not in _LAWS:
        raise UserError(f"no plan from {options.law!r}; choose one of {', '.join(_LAWS)}")
    if not 0 < budget < float("inf"):
        raise UserError(f"a budget of {budget:g} buys nothing; give one above 0")
    make: dict[str, Callable[..., dict[str, Any]]] = {"tan": _size, "isocompute": _rollouts}
    described = make.get(options.law, _pretraining)(budget, table, options)
    flops = described.get("flops")
    described["device_hours"] = None if flops is None else _hours(flops, options)
    if flops is None and (options.device is not None or options.peak is not None):
        raise UserError("device-hours need FLOPs: give --params and --completion-tokens, or a budget in FLOPs")
    described = finite(described)
    if options.json is not None:
        write_objects([described], options.json)
    if options.json != "-":
        typer.echo("\n".join(_lines(described)))


def _hours(flops: float, options: PlanOptions) -> float | None:
    peak = options.peak
    if peak is None and options.device is not None:
        peak = peak_flops(options.device)
        if peak is None:
            raise UserError(f"no peak is known of a device {options.device!r}; give --peak in FLOP/s")
    return None if peak is None else device_hours(flops, peak=peak, utilisation=options.utilisation)


def _pretraining(budget: float, table: Path | None, options: PlanOptions) -> dict[str, Any]:
    params, source, warnings = published_pretraining(options.law), "published constants", []
    if table is not None:
        (fitted,) = fit_law(table, options.law, x=options.x, y=options.y)
        if fitted.fit is None:
            raise UserError(f"{table} cannot be fitted: {fitted.reason}")
        params, source, warnings = dict(fitted.fit.params), str(table), list(fitted.warnings)
    split = pretraining_split(budget, options.law, params)
    rows = isoflop_table(budget, options.law, params, options.sizes or None)
    return {
        "law": options.law,
        "from": source,
        "params": params,
        "budget": budget,
        "flops": budget,
        "N": float(split.N),
        "D": float(split.D),
        "loss": float(split.loss),
        "tokens_per_parameter": float(split.D / split.N),
        "isoflop": [{**asdict(row), "tokens_per_parameter": row.tokens_per_parameter} for row in rows],
        "warnings": warnings,
    }


def _size(budget: float, table: Path | None, options: PlanOptions) -> dict[str, Any]:
    if table is None:
        raise UserError(
            "tan has an intercept of its own for every model: give a table with N, X, loss and --group MODEL"
        )
    if options.group is None:
        raise UserError("tan needs --group, the column that names the model of each row")
    (fitted,) = fit_law(table, "tan", x=options.x, y=options.y, group=options.group)
    if fitted.fit is None:
        raise UserError(f"{table} cannot be fitted: {fitted.reason}")
    rows = size_plan(fitted.fit, budget)
    warnings = list(fitted.warnings)
    if rows[0].beyond:
        warnings.append(f"the budget is beyond the points of {rows[0].model}: its loss is a forecast")
    return {
        "law": "tan",
        "from": str(table),
        "params": fitted.fit.params,
        "budget": budget,
        "model": rows[0].model,
        "N": rows[0].N,
        "loss": rows[0].loss,
        "models": [asdict(row) for row in rows],
        "warnings": warnings,
    }


def _step_cost(options: PlanOptions) -> Callable[[int, int], StepCost] | None:
    """FLOPs of a step, where the command line says what it depends on."""
    if options.params is None or options.completion_tokens is None:
        return None
    N, length = options.params, options.completion_tokens
    return lambda prompts, rollouts: rl_step(
        N, prompts=prompts, rollouts=rollouts, prompt_tokens=options.prompt_tokens, completion_tokens=length
    )


def _rollouts(budget: float, table: Path | None, options: PlanOptions) -> dict[str, Any]:
    cost = _step_cost(options)
    length = options.completion_tokens

    def compute(prompts: int, rollouts: int) -> float:
        if options.unit == "rollouts":
            return float(prompts * rollouts)
        if options.unit == "tokens" and length is not None:
            return prompts * rollouts * length
        if options.unit == "flops" and cost is not None:
            return cost(prompts, rollouts).total
        if options.unit not in ("rollouts", "tokens", "flops"):
            raise UserError(f"--unit {options.unit} is not rollouts, tokens or flops")
        wanted = "--completion-tokens" if options.unit == "tokens" else "--params and --completion-tokens"
        raise UserError(f"a budget in {options.unit} buys a number of steps that depends on {wanted}; give it")

    compute(1, 1)  # refuse a missing length before anything is fitted
    curves: list[dict[str, Any]] = []
    if table is None:
        source = "published constants"
        plan = _published(budget, options, compute)
    else:
        source = str(table)
        columns = read_table(table)
        names = [name.strip() for name in (options.x or "B_p,n,C").split(",")]
        if len(names) != 3:
            raise UserError(f"a sweep has three columns, B_p, n and C; --x names {len(names)}: {options.x}")
        B_p, n, C = (columns.numbers(name) for name in names)
        reward = columns.numbers(options.y or "reward")
        sweep = fit_sweep(B_p, n, C, reward, width=options.width, bounds=(options.lower, options.upper))
        plan = plan_rollouts(sweep, budget, step_compute=compute, margin=options.margin)
        for key, found in sweep.curves.items():
            curves.append({"B_p": key[0], "n": key[1], "params": found.params, "stable": sweep.stable[key[0]]})
        skipped = tuple(f"B_p = {key[0]}, n = {key[1]} is left out: {why}" for key, why in sweep.skipped.items())
        plan = replace(plan, warnings=(*plan.warnings, *skipped))
    step = None if cost is None else cost(plan.prompts, plan.rollouts)
    return {
        "law": "isocompute",
        "from": source,
        "budget": budget,
        "unit": options.unit,
        "n": plan.rollouts,
        "log2_n": plan.log2_rollouts,
        "B_p": plan.prompts,
        "M": plan.steps,
        "batch": plan.batch,
        "reward": plan.reward,
        "curves": curves,
        "step_flops": None
        if step is None
        else {"training": step.training, "sampling": step.sampling, "total": step.total, "tokens": step.tokens},
        "flops": None if step is None else step.total * plan.steps,
        "warnings": list(plan.warnings),
    }


def _published(budget: float, options: PlanOptions, compute: Callable[[int, int], float]) -> RolloutPlan:
    if options.unit != "flops":
        return plan_published_rollouts(
            budget,
            axis=options.unit,
            prompts=options.prompts,
            difficulty=options.difficulty,
            step_compute=compute,
        )
    # n* is published over rollouts and a rollout's FLOPs depend on n through the shared prompt: a few rounds settle it.
    rollouts = 8
    for _ in range(20):
        spent = budget / compute(options.prompts, rollouts) * options.prompts * rollouts
        plan = plan_published_rollouts(spent, prompts=options.prompts, difficulty=options.difficulty)
        if plan.rollouts == rollouts:
            break
        rollouts = plan.rollouts
    return replace(plan, budget=budget, steps=budget / compute(plan.prompts, plan.rollouts))


def _lines(found: Mapping[str, Any]) -> list[str]:
    lines = [f"{found['law']}, {found['from']}, budget {found['budget']:.4g}"]
    if "isoflop" in found:
        lines.append(
            f"  N = {found['N']:.4g} parameters, D = {found['D']:.4g} tokens "
            f"({found['tokens_per_parameter']:.3g} for each parameter), loss {found['loss']:.4f}"
        )
        lines.append(f"  {'N':>10}  {'D':>10}  {'D/N':>8}  {'loss':>8}  above the best")
        for row in found["isoflop"]:
            lines.append(
                f"  {row['N']:>10.4g}  {row['D']:>10.4g}  {row['tokens_per_parameter']:>8.3g}  {row['loss']:>8.4f}  "
                f"{row['excess']:.4f}"
            )
    elif "models" in found:
        lines.append(f"  best: {found['model']}, N = {found['N']:.4g}, loss {found['loss']:.4f}")
        for row in found["models"]:
            beyond = "  (beyond its points)" if row["beyond"] else ""
            lines.append(
                f"  {row['model']:<16} N {row['N']:<10.4g} slope {row['slope']:.4f} loss {row['loss']:.4f}{beyond}"
            )
    else:
        lines.append(
            f"  n = {found['n']} rollouts per prompt (law: {2 ** found['log2_n']:.4g}), B_p = {found['B_p']} prompts "
            f"per step, M = {found['M']:.4g} steps, batch {found['batch']}"
        )
        if found["reward"] is not None:
            lines.append(f"  predicted reward {found['reward']:.4g}")
        if found["step_flops"] is not None:
            step = found["step_flops"]
            lines.append(
                f"  a step: training {step['training']:.4g} FLOPs, sampling {step['sampling']:.4g}, "
                f"{step['tokens']:.4g} tokens"
            )
    if found.get("flops") is not None:
        lines.append(f"  {found['flops']:.4g} FLOPs")
    if found["device_hours"] is not None:
        lines.append(f"  {found['device_hours']:.4g} device-hours")
    return [*lines, *(f"  warning: {text}" for text in found["warnings"])]
