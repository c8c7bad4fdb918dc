#!/usr/bin/env python3
"""A trainer and samplers on Cloud TPU VMs, each a slice of its own, by plain gcloud.

    python launch/gcloud.py create NAME --zone ZONE --trainer v5litepod-16 --sampler v5litepod-8 --samplers 2
    python launch/gcloud.py install NAME --zone ZONE --samplers 2         this checkout, on every host
    python launch/gcloud.py run NAME CONFIG [KEY=VALUE]... --zone ZONE --samplers 2 --run-dir RUN
    python launch/gcloud.py delete NAME --zone ZONE --samplers 2

CONFIG is a path in the checkout. RUN must be on a file system that all hosts of the trainer share, if it has several.
`run` stays until the run has ended; call it from a machine that stays too. --project and --dry-run go with all four.
"""

import argparse
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from worlds import Command, Policy, run

_HERE = Path(__file__).resolve().parent
_TRAINER, _SAMPLER = 8477, 8478  # ports
_VM = ["gcloud", "compute", "tpus", "tpu-vm"]
_INSTALL = (
    "python3 -m venv jaxrl-venv && cd jaxrl && ../jaxrl-venv/bin/python -m pip install -q -e '.[tpu]' && "
    "../jaxrl-venv/bin/python -m pip install -q --no-deps google-jetstream==0.2.2"
)


class Cloud:
    """gcloud for the slices of one run; with `dry` it prints the commands and runs none."""

    def __init__(self, arguments: argparse.Namespace):
        self._where = [
            "--quiet",
            f"--zone={arguments.zone}",
            *([f"--project={arguments.project}"] if arguments.project else []),
        ]
        self._dry = arguments.dry_run
        self.trainer = f"{arguments.name}-trainer"
        self.samplers = [f"{arguments.name}-sampler-{index}" for index in range(arguments.samplers)]

    def words(self, verb: str, *words: str) -> list[str]:
        return [*_VM, verb, *words, *self._where]

    def call(self, verb: str, *words: str) -> str:
        """Raises subprocess.CalledProcessError; gcloud has then said why."""
        command = self.words(verb, *words)
        if self._dry:
            print(shlex.join(command))
            return ""
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout

    def on_all_hosts(self, slice_name: str, command: str) -> list[str]:
        return self.words("ssh", slice_name, "--worker=all", f"--command={command}")

    def addresses(self, slice_name: str) -> list[str]:
        """The internal addresses of its hosts, in their order; placeholders where nothing is asked."""
        told = self.call("describe", slice_name, "--format=value(networkEndpoints.ipAddress)")
        return told.replace(";", " ").replace(",", " ").split() or [f"ADDRESS_OF_{slice_name}"]


def start(words: Sequence[str]) -> str:
    """A shell command for a host: what it ran before is ended, and its number is where signals find it."""
    before = "p=$(cat jaxrl.pid 2>/dev/null) && grep -qs jaxrl /proc/$p/cmdline && kill -9 $p"
    return f"{before}; echo $$ > jaxrl.pid; cd jaxrl && exec ../jaxrl-venv/bin/{shlex.join(words)}"


def commands(cloud: Cloud, arguments: argparse.Namespace) -> tuple[Command, list[Command], list[str]]:
    """(trainer, samplers, all addresses)."""
    hosts = cloud.addresses(cloud.trainer)
    others = {name: cloud.addresses(name)[0] for name in cloud.samplers}
    files = {"token_file": "token", "tls_cert": "cert.pem", "tls_key": "key.pem", "tls_authority": "cert.pem"}
    files = {key: f"../jaxrl-credentials/{name}" for key, name in files.items()}
    words, place = [arguments.config, *arguments.overrides], f"{hosts[0]}:{_TRAINER}"
    keys = {"listen": f"0.0.0.0:{_TRAINER}", "advertise": place, **files}
    train = ["jaxrl", "train", *words, *(f"sampler.remote.{key}={value}" for key, value in keys.items())]
    if len(hosts) > 1:
        train.append("device.distributed.coordinator=auto")
    train += ["--run-dir", arguments.run_dir]
    samplers = []
    for name, address in others.items():
        sample = ["jaxrl", "sampler", *words, "--trainer", place, "--listen", f"0.0.0.0:{_SAMPLER}"]
        sample += ["--advertise", f"{address}:{_SAMPLER}"]
        sample += [f"--{key.replace('_', '-')}={value}" for key, value in files.items()]
        samplers.append(_command(cloud, name, sample))
    return _command(cloud, cloud.trainer, train), samplers, [*hosts, *others.values()]


def _command(cloud: Cloud, name: str, words: Sequence[str]) -> Command:
    def send(process: subprocess.Popen, number: int) -> None:
        said = f"kill -{signal.Signals(number).name[3:]} $(cat jaxrl.pid)"
        subprocess.run(cloud.on_all_hosts(name, said), check=False, stdout=subprocess.DEVNULL)
        if number == signal.SIGKILL:
            process.kill()

    return Command(name, cloud.on_all_hosts(name, start(words)), send=send)


def create(cloud: Cloud, arguments: argparse.Namespace) -> int:
    for name in (cloud.trainer, *cloud.samplers):
        kind = arguments.trainer if name == cloud.trainer else arguments.sampler
        extra = ["--spot"] if arguments.spot else []
        cloud.call("create", name, f"--accelerator-type={kind}", f"--version={arguments.version}", *extra)
    return 0


def install(cloud: Cloud, arguments: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        archive = f"{folder}/jaxrl.tar.gz"
        made = ["git", "-C", str(_HERE.parent), "archive", "--format=tar.gz", f"--output={archive}", "HEAD"]
        subprocess.run(made, check=True)
        for name in (cloud.trainer, *cloud.samplers):
            cloud.call("scp", archive, f"{name}:jaxrl.tar.gz", "--worker=all")
            unpack = f"mkdir -p jaxrl && tar -xzf jaxrl.tar.gz -C jaxrl && {_INSTALL}"
            cloud.call("ssh", name, "--worker=all", f"--command={unpack}")
    return 0


def run_worlds(cloud: Cloud, arguments: argparse.Namespace) -> int:
    trainer, samplers, addresses = commands(cloud, arguments)
    with tempfile.TemporaryDirectory() as folder:
        credentials = f"{folder}/jaxrl-credentials"
        subprocess.run([_HERE / "credentials.sh", credentials, *addresses], check=True)
        for name in (cloud.trainer, *cloud.samplers):
            cloud.call("scp", "--recurse", credentials, f"{name}:", "--worker=all")
    if arguments.dry_run:
        print("\n".join(shlex.join(command.words) for command in (trainer, *samplers)))
        return 0
    policy = Policy(restarts=arguments.restarts, grace_s=arguments.grace)
    return run([trainer], samplers, Path("runs") / arguments.name / "logs", policy)


def delete(cloud: Cloud, arguments: argparse.Namespace) -> int:
    for name in (cloud.trainer, *cloud.samplers):
        cloud.call("delete", name)
    return 0


def parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    verbs = parser.add_subparsers(required=True)
    for name, function in (("create", create), ("install", install), ("run", run_worlds), ("delete", delete)):
        verb = verbs.add_parser(name, allow_abbrev=False)
        verb.set_defaults(do=function)
        verb.add_argument("name", metavar="NAME")
        verb.add_argument("--zone", required=True)
        verb.add_argument("--project")
        verb.add_argument("--samplers", type=int, default=1)
        verb.add_argument("--dry-run", action="store_true", help="print gcloud's commands, call none")
        if name == "create":
            verb.add_argument("--trainer", required=True, metavar="TYPE")
            verb.add_argument("--sampler", required=True, metavar="TYPE", help="of one host")
            verb.add_argument("--version", default="tpu-ubuntu2204-base", help="of the TPU VM's software")
            verb.add_argument("--spot", action="store_true")
        if name == "run":
            verb.add_argument("config", metavar="CONFIG")
            verb.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
            verb.add_argument("--run-dir", required=True)
            verb.add_argument("--restarts", type=int, default=10)
            verb.add_argument("--grace", type=float, default=180.0)
    return parser.parse_args(words)


def main() -> int:
    arguments = parsed(sys.argv[1:])
    try:
        return arguments.do(Cloud(arguments), arguments)
    except subprocess.CalledProcessError as error:
        print(f"error: {shlex.join(map(str, error.cmd))} ended with status {error.returncode}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
