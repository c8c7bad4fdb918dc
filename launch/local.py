#!/usr/bin/env python3
"""A trainer and samplers, each a world of its own, as processes of this machine.

    python launch/local.py CONFIG [KEY=VALUE]... [--run-dir RUN] [--trainers N] [--samplers N]

Needs jaxrl_llm in this Python. The same command goes on where an interrupted run stopped. Logs: RUN/logs.
"""

import argparse
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from worlds import Command, Policy, jaxrl, run

_ADDRESS = "trainer.address"


def commands(arguments: argparse.Namespace) -> tuple[list[Command], list[Command]]:
    """(the trainer's processes, the samplers); GPUs are dealt out one after the other."""
    run_dir: Path = arguments.run_dir
    address, words = run_dir / _ADDRESS, [arguments.config, *arguments.overrides]
    places = [f"sampler.remote.listen={arguments.listen}", f"sampler.remote.announce={address}"]
    coordinator = f"127.0.0.1:{_free_port()}"
    trainers, samplers = [], []
    for index in range(arguments.trainers):
        environment = _gpus(arguments.gpus_per_trainer, index * arguments.gpus_per_trainer)
        if arguments.trainers > 1:
            environment |= {
                "JAXRL_COORDINATOR": coordinator,
                "JAXRL_PROCESSES": f"{arguments.trainers}",
                "JAXRL_PROCESS_ID": f"{index}",
            }
        name = f"trainer-{index}" if arguments.trainers > 1 else "trainer"
        trainers.append(Command(name, jaxrl("train", *words, *places, "--run-dir", str(run_dir)), environment))
    for index in range(arguments.samplers):
        first = arguments.trainers * arguments.gpus_per_trainer + index * arguments.gpus_per_sampler
        environment = _gpus(arguments.gpus_per_sampler, first)
        samplers.append(
            Command(f"sampler-{index}", jaxrl("sampler", *words, "--trainer", f"file:{address}"), environment)
        )
    return trainers, samplers


def _gpus(count: int, first: int) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(first, first + count)))} if count else {}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("config", help="a YAML file", metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", help="dotted overrides for all worlds", metavar="KEY=VALUE")
    parser.add_argument("--run-dir", type=Path, metavar="RUN", help="[default: runs/<name of CONFIG>]")
    parser.add_argument("--trainers", type=_count, default=1, metavar="N", help="processes of the trainer [1]")
    parser.add_argument("--samplers", type=_count, default=1, metavar="N", help="sampler worlds [1]")
    parser.add_argument("--gpus-per-trainer", type=int, default=0, metavar="N", help="0: whatever JAX sees [0]")
    parser.add_argument("--gpus-per-sampler", type=int, default=0, metavar="N", help="0: whatever JAX sees [0]")
    parser.add_argument("--listen", default="127.0.0.1:0", help="where the trainer awaits samplers [127.0.0.1:0]")
    parser.add_argument("--restarts", type=int, default=10, help="in a row, of a sampler that dies at once [10]")
    parser.add_argument("--grace", type=float, default=60.0, help="seconds a process may take to end [60]")
    arguments = parser.parse_intermixed_args(words)
    if odd := [word for word in arguments.overrides if "=" not in word]:
        parser.error(f"{odd[0]!r} is not of the form KEY=VALUE")
    if arguments.run_dir is None:
        arguments.run_dir = Path("runs") / Path(arguments.config).stem
    return arguments


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return count


def main() -> int:
    arguments = parsed(sys.argv[1:])
    (arguments.run_dir / _ADDRESS).unlink(missing_ok=True)  # of a trainer that is no more
    trainers, samplers = commands(arguments)
    policy = Policy(restarts=arguments.restarts, grace_s=arguments.grace)
    return run(trainers, samplers, arguments.run_dir / "logs", policy)


if __name__ == "__main__":
    sys.exit(main())
