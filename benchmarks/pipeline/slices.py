"""Simulated slices: pipeline-8, ppo_off_policy-8 and sync with what steps and tokens cost, on chips that are not here.

python benchmarks/pipeline/slices.py --costs benchmarks/pipeline/d256_costs.json --chips 20 --samplers 10
Completion lengths are drawn from a log-normal law with a cap, like those of a policy that thinks.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np

from jaxrl_llm.pipeline.planner import Plan, compare_modes, read_costs, splits
from jaxrl_llm.rollout.lag import LagRule

PUBLISHED = {"pipeline": 4.55, "ppo_off_policy": 2.68, "sync": 2.15}  # ScaleRL: B at A = .520
RULES = [LagRule("sync"), LagRule("ppo_off_policy", 8), LagRule("pipeline", 8)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--costs", type=Path, required=True)
    parser.add_argument("--chips", type=int, default=80)
    parser.add_argument("--samplers", type=int, help="the best number for pipeline-8 unless it is given")
    parser.add_argument("--slots", type=int, default=128, help="of each sampler")
    parser.add_argument("--median", type=float, default=3600, help="of completion lengths, in tokens")
    parser.add_argument("--sigma", type=float, default=0.7)
    parser.add_argument("--longest", type=float, default=14336)
    parser.add_argument("--order", choices=("issue", "finished"), default="issue")
    parser.add_argument("--steps", type=int, default=32)
    options = parser.parse_args()
    drawn = np.random.default_rng(0).lognormal(np.log(options.median), options.sigma, 512)
    lengths = tuple(float(n) for n in np.clip(drawn, 16, options.longest).round())
    measured = read_costs(options.costs)
    costs = dataclasses.replace(measured, lengths=lengths, overlap_train=1.0, overlap_sample=1.0)
    plan = Plan(
        RULES[-1], prompts_per_step=48, group_size=16, slots=options.slots, decode_steps=16, order=options.order
    )
    if options.samplers:
        trainer_chips = options.chips - options.samplers * costs.sampler_chips
        split = {"trainer_chips": trainer_chips, "samplers": options.samplers}
    else:
        best = splits(plan, costs, chips=options.chips, trainer_multiple=costs.sampler_chips, steps=options.steps)[0]
        split = {name: best[name] for name in ("trainer_chips", "samplers")}
    for row in compare_modes(RULES, plan, costs, steps=options.steps, **split):
        print(json.dumps(row | {"published_B": PUBLISHED[row["mode"]]} | split))


if __name__ == "__main__":
    main()
