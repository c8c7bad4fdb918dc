"""Runs this project's sampler and peers in turn, several rounds, and prints each one's best and the ratios.

    python benchmarks/sampler/compare.py --preset d256 --peer trl=PEER_ENV/bin/python --peer tunix=OTHER_ENV/bin/python

Processes take turns (A B C, A B C, ...), so that a busy minute of the machine meets all of them.
"""

import json
import subprocess
import sys
from pathlib import Path

from workload import arguments

HERE = Path(__file__).parent


def one(command: list[str]) -> dict:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="trl=... or tunix=...")
    options = parser.parse_args()
    names = ("preset", "prompts", "group", "prompt_len", "new", "repeats")
    shared = [text for name in names for text in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
    commands = {"jaxrl_llm": [sys.executable, str(HERE / "ours.py"), *shared, "--slots", str(options.slots)]}
    for peer in options.peer:
        name, _, python = peer.partition("=")
        commands[name] = [python, str(HERE / "peers" / f"{name}_rollout.py"), *shared]
    rates: dict[str, list[dict]] = {name: [] for name in commands}
    for _ in range(options.rounds):
        for name, command in commands.items():
            rates[name].append(one(command))
            print(json.dumps(rates[name][-1]), flush=True)
    best = {
        name: {key: max(result[key] for result in results) for key in ("rollout_tok_s", "decode_tok_s")}
        for name, results in rates.items()
    }
    ours = best["jaxrl_llm"]
    print(f"{options.preset}: {options.prompts} prompts of {options.prompt_len} x {options.group}, {options.new} new")
    for name, rate in best.items():
        ratios = "  ".join(f"{key} {rate[key]:8.0f} (ours / it {ours[key] / rate[key]:.2f})" for key in rate)
        print(f"  {name:10s} {ratios}")


if __name__ == "__main__":
    main()
