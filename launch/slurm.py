"""What launch/slurm.sh runs on the first node of an allocation: srun steps for a trainer and samplers."""

import argparse
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from worlds import Command, Policy, jaxrl, run

_ADDRESS = "trainer.address"
# Where JAX's own detection looks too: above the ports that systems give out themselves.
_FIRST_PORT, _PORTS = 61440, 4096


def output(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def nodes_and_addresses(node_list: str) -> dict[str, str]:
    """The allocation's nodes in Slurm's order, and where each is reached."""
    found = dict(line.split() for line in output("sinfo", "-h", "-N", "-n", node_list, "-o", "%N %o").splitlines())
    names = output("scontrol", "show", "hostnames", node_list).split()
    return {name: found.get(name, name) for name in names}


def commands(
    arguments: argparse.Namespace, job: str, nodes: Mapping[str, str], python: Sequence[str] | None = None
) -> tuple[Command, list[Command]]:
    """(the trainer's step, the samplers' steps)."""
    names, run_dir, secrets = list(nodes), arguments.run_dir, arguments.run_dir / "credentials"
    ours, theirs = names[: arguments.trainer_nodes], names[arguments.trainer_nodes :]
    address, words = run_dir / _ADDRESS, [arguments.config, *arguments.overrides]
    files = {
        "token_file": secrets / "token",
        "tls_cert": secrets / "cert.pem",
        "tls_key": secrets / "key.pem",
        "tls_authority": secrets / "cert.pem",
    }
    keys = {"listen": f"{nodes[ours[0]]}:0", "announce": address, **files}
    train = jaxrl(
        "train", *words, *(f"sampler.remote.{key}={value}" for key, value in keys.items()), "--run-dir", str(run_dir)
    )
    environment = {}
    if len(ours) > 1:
        environment = {
            "JAXRL_COORDINATOR": f"{nodes[ours[0]]}:{_FIRST_PORT + int(job) % _PORTS}",
            "JAXRL_PROCESSES": f"{len(ours)}",
        }
        # Which process it is, each task knows itself.
        train = ["bash", "-c", f"JAXRL_PROCESS_ID=$SLURM_PROCID exec {shlex.join(train)}"]
    options = [f"--{name.replace('_', '-')}={value}" for name, value in files.items()]
    samplers = [
        _step(
            f"sampler-{index}",
            [node],
            arguments.srun,
            jaxrl("sampler", *words, "--trainer", f"file:{address}", "--listen", f"{nodes[node]}:0", *options),
            job,
        )
        for index, node in enumerate(theirs)
    ]
    return _step("trainer", ours, arguments.srun, train, job, environment), samplers


def _step(
    name: str,
    nodes: Sequence[str],
    extra: Sequence[str],
    words: Sequence[str],
    job: str,
    environment: Mapping[str, str] | None = None,
) -> Command:
    count = str(len(nodes))
    placed = ["--nodes", count, "--ntasks", count, "--ntasks-per-node", "1", "--nodelist", ",".join(nodes)]
    # --kill-on-bad-exit=0: processes that lose one of theirs still say so, and save what can be saved.
    srun = ["srun", "--job-name", name, *placed, "--overlap", "--kill-on-bad-exit=0", *extra]
    return Command(
        name, [*srun, *words], environment or {}, send=lambda process, number: _send(job, name, process, number)
    )


def _send(job: str, name: str, process: subprocess.Popen, number: int) -> None:
    """srun answers SIGTERM by killing its step at once, so that the step's processes are signalled past it."""
    if number != signal.SIGKILL:
        steps = (line.split() for line in output("squeue", "-h", "-s", "-j", job, "-o", "%i %j").splitlines())
        if found := [step for step, called in steps if called == name]:
            subprocess.run(["scancel", f"--signal={signal.Signals(number).name[3:]}", found[-1]], check=False)
            return
    process.terminate()


def parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sbatch launch/slurm.sh", description=__doc__, allow_abbrev=False)
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--run-dir", type=Path, required=True, metavar="RUN", help="on a file system all nodes share")
    parser.add_argument("--trainer-nodes", type=int, default=1, metavar="N", help="a process on each; default 1")
    parser.add_argument("--srun", type=shlex.split, default=[], metavar="OPTIONS", help="more options for every srun")
    parser.add_argument("--restarts", type=int, default=10, help="in a row, of a sampler that dies at once")
    parser.add_argument("--grace", type=float, default=60.0, help="seconds a process may take to end")
    return parser.parse_intermixed_args(words)


def main() -> int:
    arguments = parsed(sys.argv[1:])
    try:
        job, node_list = os.environ["SLURM_JOB_ID"], os.environ["SLURM_JOB_NODELIST"]
    except KeyError as missing:
        print(f"error: no {missing}: start this through sbatch launch/slurm.sh", file=sys.stderr)
        return 2
    nodes = nodes_and_addresses(node_list)
    if not 1 <= arguments.trainer_nodes < len(nodes):
        print(
            f"error: --trainer-nodes {arguments.trainer_nodes} of {len(nodes)} nodes leaves trainer or samplers "
            "without one; ask sbatch for more --nodes",
            file=sys.stderr,
        )
        return 2
    (arguments.run_dir / _ADDRESS).unlink(missing_ok=True)  # of a trainer that is no more
    credentials = [Path(__file__).with_name("credentials.sh"), arguments.run_dir / "credentials"]
    subprocess.run([*credentials, *dict.fromkeys([*nodes, *nodes.values()])], check=True)
    trainer, samplers = commands(arguments, job, nodes)
    policy = Policy(restarts=arguments.restarts, grace_s=arguments.grace)
    return run([trainer], samplers, arguments.run_dir / "logs", policy)


if __name__ == "__main__":
    sys.exit(main())
