"""The planner's prediction beside a measured run: every mode run and predicted, costs measured on the run's weights.

Costs are measured after each run, because a machine's speed may change from one minute to the next.

python benchmarks/pipeline/local.py --steps 120
The policy is frozen (rate 0), so that lengths and the share of trained groups stay what they were when costs were
measured.
"""

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from costs import measure

from jaxrl_llm.checkpoints.orbax import CheckpointStore
from jaxrl_llm.cli.assemble import assemble
from jaxrl_llm.cli.simulating import plan_of
from jaxrl_llm.cli.training import run_training
from jaxrl_llm.config import load
from jaxrl_llm.metrics import read_records
from jaxrl_llm.pipeline.planner import predict

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
PARTS = ("trainer_wait_s", "pack_s", "dispatch_s", "publish_s", "device_wait_s", "record_s", "sampler_wait_s")
MODES = {"sync": [], "ppo_off_policy": ["rollout.max_lag=8"], "pipeline": ["rollout.max_lag=8"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    rows, unmeasured_s, load_before = [], 0.0, os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        for mode, more in MODES.items():
            once = [f"{key}={options.steps}" for key in ("train.steps", "eval.every", "checkpoint.every")]
            frozen = ["optimizer.lr=0", "optimizer.decay_steps=0", "algorithm.no_positive_resampling=null"]
            own = [*options.overrides, f"rollout.mode={mode}", *more, *once, *frozen, "sft.steps=150"]
            config = load(options.config, own)
            run_dir = Path(folder) / mode
            assert run_training(config, run_dir, reinforce=True) == "finished"
            records = [record for _, record in read_records(run_dir / "metrics.jsonl")][options.steps // 4 :]
            measured = sum(record["step_s"] for record in records) / len(records)
            params = CheckpointStore(run_dir / "checkpoints", keep=1).read_params(0)
            setup = assemble(config)
            costs = measure(setup, params)
            costs = dataclasses.replace(costs, host_s=costs.host_s + unmeasured_s)
            shown = {k: v for k, v in dataclasses.asdict(costs).items() if k != "lengths"}
            print(json.dumps({"costs": shown}), flush=True)
            predicted = predict(plan_of(config, local=True), costs, trainer_chips=setup.trainer_mesh.size, samplers=1)
            rows.append(
                {
                    "mode": mode,
                    "measured_step_s": measured,
                    "predicted_step_s": predicted["step_s"],
                    "ratio": predicted["step_s"] / measured,
                    "lag_mean": (sum(r["lag_mean"] for r in records) / len(records), predicted["lag_mean"]),
                    "measured_parts_s": {
                        name: sum(record[name] for record in records) / len(records) for name in PARTS
                    },
                    "predicted_waits_s": predicted["trainer_waits_s"],
                }
            )
            if mode == "sync":
                # What a step took beyond its measured parts is the host's: records, books, Python's lock.
                unmeasured_s = max(0.0, measured - predicted["step_s"])
            print(json.dumps(rows[-1]), flush=True)
    print(f"load average {load_before:.1f} before, {os.getloadavg()[0]:.1f} after, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
