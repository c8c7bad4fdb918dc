"""Runs commands in turn, several rounds (A B C, A B C, ...), so that a busy minute of the machine meets all of them."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence


def _one(command: Sequence[str]) -> dict:
    # Huge pages for all of them, peers too: `jaxrl` asks for them, other stacks' users can (see cli/entry.py).
    environment = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} | os.environ
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def take_turns(commands: Mapping[str, Sequence[str]], rounds: int, keys: Sequence[str]) -> None:
    """Print every run's JSON line, then each command's best `keys` and the first command's ratio to them."""
    results: dict[str, list[dict]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            results[name].append(_one(command))
            print(json.dumps(results[name][-1]), flush=True)
    best = {name: {key: max(result[key] for result in runs) for key in keys} for name, runs in results.items()}
    first, ours = next(iter(best.items()))
    for name, rate in best.items():
        ratios = "  ".join(f"{key} {rate[key]:8.0f} ({first} / it {ours[key] / rate[key]:.2f})" for key in keys)
        print(f"  {name:20s} {ratios}")
