"""A synthetic run directory in the format that the pipeline writes."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm.report.fitting import fit_run
from jaxrl_llm.report.html import write_report
from jaxrl_llm.scaling.laws import sigmoid

STEPS, EVERY, BOUND = 64, 2, 8


def write_lines(path: Path, records: list[dict], tail: str = "") -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail)


def metric_lines(steps: int = STEPS) -> list[dict]:
    generator = np.random.default_rng(0)
    lines = []
    for step in range(1, steps + 1):
        share = float(sigmoid(step, 0.9, 2.0, 18.0, 0.3))
        lag = min(step - 1, 6)
        lines.append(
            {
                "step": step,
                "reward_mean": 2 * share - 1 + 0.05 * float(generator.normal()),
                "pass_rate": min(max(share + 0.03 * float(generator.normal()), 0), 1),
                "completion_tokens_mean": 4.0 + 0.3 * float(generator.normal()),
                "entropy": 1.2 * np.exp(-step / 40) + 0.02 * abs(float(generator.normal())),
                "truncation_rate": 0.02 if step % 2 else 0.04,
                "lag_max": lag,
                "lag_mean": lag / 2,
                "lag_histogram": [10] * (lag + 1) + [0] * (BOUND - lag),
                "lag_bound": BOUND,
                "ratio_mean": 1.0,
                "ratio_max": 1.4 + 0.2 * abs(float(generator.normal())),
                "capped_fraction": 0.0,
                "grad_norm": 0.5 + 0.1 * abs(float(generator.normal())),
                "lr": 1e-3,
                "groups": 32,
                "groups_zero_variance": 4,
                "prompts_issued": 32 * step + 40,
                "prompts_trained": 28 * step,
                "prompts_dropped": {"zero variance": 4 * step},
                "prompts_in_flight": 40,
                "tokens_generated": 2200 * step,
                "tokens_trained": 2000 * step,
                "flops": 3e9 * step,
                "device_seconds": 1.1 * step,
                "wall_s": 0.6 * step,
                "trainer_wait_s": 0.1,
                "sampler_wait_s": 0.05,
                "step_s": 0.6,
                "tokens_per_s": 3600.0 + 50 * float(generator.normal()),
            }
        )
    return lines


def eval_lines(steps: int = STEPS) -> list[dict]:
    generator = np.random.default_rng(1)
    return [
        {
            "step": step,
            "version": step,
            "metric": "mean@4",
            "value": round(float(sigmoid(float(step), 0.9, 2.0, 18.0, 0.3)) + 0.008 * float(generator.normal()), 6),
            "prompts": 1000,
            "samples": 4,
            "mismatch_max": 1e-6 * (1 + step % 7),
            "mismatch_mean": 1e-7,
            "flops": 3e9 * step,
            "tokens": 2200 * step,
            "device_seconds": 1.1 * step,
            "wall_s": 0.6 * step,
            "truncation_rate": 0.01,
        }
        for step in range(0, steps + 1, EVERY)
    ]


def mixture_lines() -> list[dict]:
    """Evaluations of two sources of equally many prompts, each with a curve of its own."""
    generator = np.random.default_rng(2)
    found = []
    for line in eval_lines():
        apart = {
            name: float(sigmoid(float(line["step"]), A, 2.0, middle, 0.3)) + 0.004 * float(generator.normal())
            for name, A, middle in (("sums", 0.95, 12.0), ("tokens", 0.75, 20.0))
        }
        mean = sum(apart.values()) / 2
        found.append(line | {"value": mean} | {f"value/{name}": value for name, value in apart.items()})
    return found


def sample_lines() -> list[dict]:
    return [
        {
            "step": step,
            "task_id": f"addition/{step}",
            "prompt": f"{10 + step}+37=",
            "completion": f"{47 + step}",
            "answer": f"{47 + step}",
            "reward": 1.0,
            "finish": "stop",
        }
        for step in range(1, 21)
    ]


@pytest.fixture
def run_dir(tmp_path) -> Path:
    """A finished run of 64 steps with 33 evaluations; the test may change it."""
    return build_run(tmp_path / "quickstart")


@pytest.fixture
def mixture_dir(run_dir) -> Path:
    """The same of a mixture of two sources, `sums` and `tokens`."""
    write_lines(run_dir / "eval.jsonl", mixture_lines())
    return run_dir


@pytest.fixture(scope="session")
def reported_run(tmp_path_factory) -> Path:
    """The same with fit.json and report.html, made once; to be left as it is."""
    path = build_run(tmp_path_factory.mktemp("runs") / "quickstart")
    fit_run(path)
    assert write_report(path) == path / "report.html"
    return path


def build_run(path: Path) -> Path:
    path.mkdir()
    (path / "config.yaml").write_text("seed: 0\ntrain:\n  steps: 64\n")
    (path / "environment.json").write_text(json.dumps({"packages": {"jax": "0.10.2"}, "seed": 0}))
    (path / "state.json").write_text(json.dumps({"state": "finished", "step": STEPS, "steps": STEPS, "message": None}))
    write_lines(path / "metrics.jsonl", metric_lines())
    write_lines(path / "eval.jsonl", eval_lines())
    write_lines(path / "samples.jsonl", sample_lines())
    return path
