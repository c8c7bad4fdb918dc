"""Runs this project's sampler and peers in turn, several rounds, and prints each one's best and the ratios.

python benchmarks/sampler/compare.py --preset d256 --peer trl=PEER_ENV/bin/python --peer tunix=OTHER_ENV/bin/python
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from turns import take_turns
from workload import arguments, flags_of

HERE = Path(__file__).parent


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="trl=... or tunix=...")
    options = parser.parse_args()
    shared = flags_of(options)
    commands = {"jaxrl_llm": [sys.executable, str(HERE / "ours.py"), *shared, "--slots", str(options.slots)]}
    for peer in options.peer:
        name, _, python = peer.partition("=")
        commands[name] = [python, str(HERE.parent / "peers" / f"{name}_rollout.py"), *shared]
    take_turns(commands, options.rounds, ("rollout_tok_s", "decode_tok_s"))


if __name__ == "__main__":
    main()
