"""A real Slurm of two nodes on this machine: its own munged, slurmctld and slurmd, in a folder of its own."""

import getpass
import os
import shutil
import socket
import subprocess
import time
from contextlib import ExitStack, contextmanager

import pytest

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "squeue", "sinfo", "scontrol")
_WHERE = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
KillWait=30
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=all Nodes=n0,n1 Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(count):
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


@contextmanager
def slurm(folder):
    """Yields the environment in which Slurm's commands speak to this cluster."""
    if missing := [name for name in _PROGRAMS if shutil.which(name, path=_WHERE) is None]:
        pytest.fail(
            f"Slurm is not here ({', '.join(missing)}). Install it (Debian: apt-get install slurm-wlm munge), or leave "
            "its tests out with -m 'slow and not slurm'"
        )
    for name in ("state", "n0", "n1"):
        (folder / name).mkdir(mode=0o700)
    key, config = folder / "munge.key", folder / "slurm.conf"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    host = socket.gethostname().partition(".")[0]
    config.write_text(_CONFIG.format(host=host, user=getpass.getuser(), folder=folder, ports=free_ports(3)))
    munge = {"socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log", "seed-file": "munge.seed"}
    commands = {
        "munged": ["--foreground", "--force", f"--key-file={key}", *(f"--{k}={folder / v}" for k, v in munge.items())],
        "slurmctld": ["-D", "-f", config],
        "n0": ["-D", "-f", config, "-N", "n0"],
        "n1": ["-D", "-f", config, "-N", "n1"],
    }
    environment = os.environ | {"SLURM_CONF": str(config), "PATH": _WHERE}
    daemons = []
    try:
        for name, words in commands.items():
            program = shutil.which("slurmd" if name in ("n0", "n1") else name, path=_WHERE)
            with open(folder / f"{name}.out", "w") as out:
                daemons.append(subprocess.Popen([program, *words], stdout=out, stderr=out, env=environment))
            if name == "munged":
                wait_until(lambda: (folder / "munge.socket").exists(), folder)
        wait_until(lambda: output(environment, "sinfo", "-h", "-o", "%T %D").strip() == "idle 2", folder)
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def output(environment, *words):
    return subprocess.run(words, env=environment, capture_output=True, text=True).stdout


def wait_until(condition, folder, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            said = [f"{path.name}: {path.read_text()[-1000:]}" for path in sorted(folder.glob("*.out"))]
            raise AssertionError("Slurm did not come up\n" + "\n".join(said))
        time.sleep(0.2)
