"""How often a run compiles: counted by JAX, over a hundred steps of prompts and completions of every length."""

from collections import Counter

import jax
import pytest

EVENT = "/jax/core/compile/backend_compile_duration"
BUCKETS = "[4,6,8]"
OPTIONS = [
    "data.sources=[{name: addition, kind: arithmetic, low: 1, high: 99, heldout: 16}]",
    "model.max_context=16", "rollout.max_prompt_tokens=8", "rollout.max_new_tokens=5",
    f"sampler.prefill_buckets={BUCKETS}", "sft.steps=0", "train.steps=100", "eval.every=50", "checkpoint.every=50",
    # An untrained policy is always wrong: with a baseline there would be nothing to train on.
    "algorithm.zero_variance_filter=false", "algorithm.baseline=none", "algorithm.normalisation=none",
]  # fmt: skip
SHARED = [
    "train.share_prompts=true", "train.mesh={fsdp: 2}", "train.remat=dots", "rollout.max_lag=2",
    "rollout.prompts_per_step=4", "algorithm.updates_per_batch=2", "algorithm.objective=gspo",
    "algorithm.aggregation=sample",
]  # fmt: skip


@pytest.fixture
def compiled(tiny):
    """(program, steps recorded by then) of every compilation from now on, those from JAX's cache on disk included."""
    seen, path = [], tiny.parent / "run" / "metrics.jsonl"

    def listen(event, _, *, fun_name="", **more):
        if event == EVENT:
            seen.append((fun_name, path.read_text().count("\n") if path.exists() else 0))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize(
    "more",
    [pytest.param([], marks=pytest.mark.slow), SHARED],
    ids=["plain", "shared prompts, updates, mesh"],
)
def test_a_hundred_steps_of_mixed_batches_compile_every_program_once(more, tiny, jaxrl, records, compiled):
    status, _, err = jaxrl("train", tiny, *OPTIONS, *more, "--run-dir", tiny.parent / "run")
    assert status == 0, err
    steps = records(tiny.parent / "run", "metrics")
    assert len(steps) == 100
    assert len({record["tokens_trained"] for record in steps}) > 10
    programs = Counter(name for name, _ in compiled)
    assert programs["jit(train_step)"] == programs["jit(_generate)"] == programs["jit(logprobs)"] == 1
    # A prefill for each bucket, and the optimizer's first state.
    assert programs["jit(<lambda>)"] == BUCKETS.count(",") + 1 + 1
    assert max(programs.values()) == programs["jit(<lambda>)"]
    assert max(step for _, step in compiled) < 50
