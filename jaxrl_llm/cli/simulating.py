"""`jaxrl simulate`: what a configuration's run would be like on so many chips."""

from pathlib import Path
from typing import Any

from jaxrl_llm.config import RunConfig
from jaxrl_llm.pipeline.planner import Plan, read_costs, splits
from jaxrl_llm.rollout.lag import LagRule


def plan_of(config: RunConfig, *, local: bool = False) -> Plan:
    """What the planner needs of a configuration."""
    rollout = config.rollout
    return Plan(
        rule=LagRule(rollout.mode, rollout.max_lag),
        prompts_per_step=rollout.prompts_per_step,
        group_size=rollout.group_size,
        slots=config.sampler.slots,
        decode_steps=config.sampler.decode_steps,
        order=rollout.order,
        ready_batches=rollout.ready_batches,
        local=local,
    )


def simulate(config: RunConfig, costs: Path, *, chips: int, trainer_multiple: int, steps: int) -> dict[str, Any]:
    """Every split of `chips` between trainer and samplers, the fastest as "recommended"."""
    rows = splits(plan_of(config), read_costs(costs), chips=chips, trainer_multiple=trainer_multiple, steps=steps)
    return {"chips": chips, "recommended": rows[0], "splits": rows}
