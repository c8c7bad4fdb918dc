"""Runs this project's training step, with and without shared prompts, and peers' in turn; prints the ratios.

python benchmarks/train_step/compare.py --preset d256 --peer trl=PEER_ENV/bin/python --peer tunix=OTHER_ENV/bin/python
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
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="trl=... or tunix=...")
    options = parser.parse_args()
    shared = flags_of(options)
    ours = [sys.executable, str(HERE / "ours.py"), "--unroll", "4", *shared]
    commands = {"shared prompts": [*ours, "--share-prompts"], "plain rows": ours}
    for peer in options.peer:
        name, _, python = peer.partition("=")
        commands[name] = [python, str(HERE.parent / "peers" / f"{name}_train.py"), *shared]
    take_turns(commands, options.rounds, ("train_tok_s",))


if __name__ == "__main__":
    main()
