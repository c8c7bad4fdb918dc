"""The work every sampler is timed on: model shapes, prompts and lengths. Imports nothing heavy: peers read it too."""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Shape:
    layers: int
    d_model: int
    d_ff: int
    heads: int
    kv_heads: int
    vocab: int
    rope_theta: float = 500_000.0

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads


PRESETS = {
    "d256": Shape(4, 256, 1024, 4, 2, 1024),
    "d384": Shape(4, 384, 1536, 6, 2, 1024),
    "v32k": Shape(4, 256, 1024, 4, 2, 32768),
    "smollm2": Shape(30, 576, 1536, 9, 3, 49152, 100_000.0),
}


@dataclass(frozen=True)
class Work:
    """`prompts` prompts of exactly `prompt_len` random ids, `group` completions of exactly `new` tokens each."""

    preset: str
    prompts: int
    group: int
    prompt_len: int
    new: int
    repeats: int

    @property
    def sequences(self) -> int:
        return self.prompts * self.group


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--preset", choices=PRESETS, default="d256")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--prompt-len", type=int, default=32)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    return parser


def work_of(options: argparse.Namespace) -> Work:
    names = ("preset", "prompts", "group", "prompt_len", "new", "repeats")
    return Work(**{name: getattr(options, name) for name in names})


def flags_of(options: argparse.Namespace) -> list[str]:
    """The same work as command line flags."""
    names = ("preset", "prompts", "group", "prompt_len", "new", "repeats")
    return [text for name in names for text in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]


def timed(call: Callable[[], object], repeats: int) -> list[float]:
    """Wall seconds of `repeats` calls, after two that are not counted (they compile)."""
    for _ in range(2):
        call()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def report_step(stack: str, work: Work, step_s: list[float], **more: object) -> None:
    """One JSON line about a training step on all sequences; its tokens are counted as if no prompt were shared."""
    tokens = work.sequences * (work.prompt_len + work.new)
    line = {"stack": stack, **asdict(work), "load": os.getloadavg()[0], "step_s": step_s}
    rates = {"train_tok_s": tokens / min(step_s), "train_tok_s_median": tokens / statistics.median(step_s)}
    print(json.dumps(line | rates | more))


def report(stack: str, work: Work, rollout_s: list[float], prefill_s: list[float], **more: object) -> None:
    """One JSON line: `rollout` is prefill and decode of everything, `prefill` the same with one new token."""
    decoded = work.sequences * (work.new - 1)
    print(
        json.dumps(
            {
                "stack": stack,
                **asdict(work),
                "load": os.getloadavg()[0],
                "rollout_s": rollout_s,
                "prefill_s": prefill_s,
                "rollout_tok_s": work.sequences * (work.prompt_len + work.new) / min(rollout_s),
                "decode_tok_s": decoded / max(1e-9, min(rollout_s) - min(prefill_s)),
                "rollout_s_median": statistics.median(rollout_s),
                **more,
            }
        )
    )
