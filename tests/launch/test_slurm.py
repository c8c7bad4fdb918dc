"""launch/slurm.sh: what its steps are, and the same under a real Slurm on this machine (slow)."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import slurm
import slurm_cluster

LAUNCH = Path(__file__).parents[2] / "launch"
NODES = {"n07": "10.0.0.7", "n08": "n08", "n09": "10.0.0.9"}


def steps(*words, nodes=NODES):
    return slurm.commands(slurm.parsed(["conf.yaml", "seed=7", "--run-dir", "/shared/run", *words]), "70000", nodes)


def after(command, option):
    return command.words[command.words.index(option) + 1]


def test_the_trainer_has_the_first_nodes_and_every_other_one_is_a_sampler():
    trainer, samplers = steps("--trainer-nodes", "2", "--srun", "--mem=0 --cpu-bind=none")
    assert (after(trainer, "--nodelist"), after(trainer, "--ntasks")) == ("n07,n08", "2")
    assert [(s.name, after(s, "--nodelist"), after(s, "--ntasks")) for s in samplers] == [("sampler-0", "n09", "1")]
    assert {"--mem=0", "--cpu-bind=none"} <= {*trainer.words} & {*samplers[0].words}
    # The port is that of the job, so that two of them on one node do not meet.
    assert trainer.environment == {"JAXRL_COORDINATOR": "10.0.0.7:61808", "JAXRL_PROCESSES": "2"}
    assert "JAXRL_PROCESS_ID=$SLURM_PROCID exec" in trainer.words[-1]
    assert "sampler.remote.listen=10.0.0.7:0 sampler.remote.announce=/shared/run/trainer.address" in trainer.words[-1]
    sample = " ".join(samplers[0].words)
    assert " sampler conf.yaml seed=7 --trainer file:/shared/run/trainer.address --listen 10.0.0.9:0 " in sample
    assert "--token-file=/shared/run/credentials/token" in sample


def test_a_trainer_of_one_node_is_one_process():
    trainer, samplers = steps()
    assert trainer.environment == {}
    assert [after(s, "--nodelist") for s in samplers] == ["n08", "n09"]
    assert trainer.words[-2:] == ["--run-dir", "/shared/run"]


def test_outside_of_slurm_it_says_how_to_start_it(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    command = [sys.executable, LAUNCH / "slurm.py", "conf.yaml", "--run-dir", tmp_path]
    told = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert told.returncode == 2
    assert "no 'SLURM_JOB_ID': start this through sbatch launch/slurm.sh" in told.stderr


@pytest.fixture(scope="module")
def cluster():
    """The environment for the commands of a Slurm of two nodes; a short path, for munge's socket."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, slurm_cluster.slurm(Path(folder)) as environment:
        yield environment


def submit(cluster, folder, *words, environment=None):
    """(job, file of its output)"""
    out = folder / "job.out"
    command = ["sbatch", "--parsable", "--nodes=2", f"--output={out}", LAUNCH / "slurm.sh", *words]
    own = {"JAXRL_LAUNCH": str(LAUNCH), "JAXRL_PYTHON": sys.executable} | (environment or {})
    told = subprocess.run(command, env=cluster | own, cwd=folder, capture_output=True, text=True, check=True)
    return told.stdout.strip(), out


def ended(cluster, job, seconds):
    """The exit status of a job, once it is over."""
    deadline = time.monotonic() + seconds
    while True:
        told = slurm_cluster.output(cluster, "scontrol", "show", "job", job)
        facts = dict(word.partition("=")[::2] for word in told.split())
        if facts["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"):
            return int(facts["ExitCode"].partition(":")[0])
        assert time.monotonic() < deadline, told
        time.sleep(0.5)


# In the place of the package: the trainer waits for the sampler's second life and a signal.
FAKE = """
import os, pathlib, signal, sys, time
here = pathlib.Path(os.environ["FAKE_FOLDER"])
def main():
    kind, node = sys.argv[1], os.environ["SLURMD_NODENAME"]
    print(kind, "on", node, flush=True)
    if kind == "sampler":
        lives = len(list(here.glob("life-*")))
        (here / f"life-{lives}").write_text("")
        if lives == 0:
            os.kill(os.getpid(), 9)
    def stop(number, _):
        print(kind, "stopping", flush=True)
        time.sleep(1)
        print(kind, "saved", flush=True)
        sys.exit(130 if kind == "train" else 0)
    signal.signal(signal.SIGTERM, stop)
    (here / kind).write_text("")
    time.sleep(120)
"""


@pytest.mark.slow
@pytest.mark.slurm
def test_steps_restart_and_stop_under_a_real_slurm(cluster, tmp_path):
    package = tmp_path / "fake" / "jaxrl_llm" / "cli"
    package.mkdir(parents=True)
    for path in (package.parent, package):
        (path / "__init__.py").write_text("")
    (package / "main.py").write_text(FAKE)
    environment = {"PYTHONPATH": str(tmp_path / "fake"), "FAKE_FOLDER": str(tmp_path)}
    job, out = submit(cluster, tmp_path, "conf.yaml", "--run-dir", tmp_path / "run", environment=environment)
    deadline = time.monotonic() + 120
    while not ((tmp_path / "life-1").exists() and (tmp_path / "train").exists() and (tmp_path / "sampler").exists()):
        assert time.monotonic() < deadline, out.read_text()
        time.sleep(0.2)
    # As Slurm does before the time is up.
    subprocess.run(["scancel", "--batch", "--signal=TERM", job], env=cluster, check=True)
    assert ended(cluster, job, 120) == 130, out.read_text()
    said = out.read_text().splitlines()
    assert "trainer | train on n0" in said
    assert said.count("sampler-0 | sampler on n1") == 2
    assert any("sampler-0 ended with status 137; it is started again" in line for line in said)
    # Each was asked, not killed; the sampler after the trainer.
    expected = ("trainer | train stopping", "trainer | train saved", "sampler-0 | sampler stopping")
    order = [said.index(line) for line in (*expected, "sampler-0 | sampler saved")]
    assert order == sorted(order)
    assert (tmp_path / "run" / "logs" / "trainer.log").exists()


@pytest.mark.slow
@pytest.mark.slurm
def test_the_quickstart_runs_under_a_real_slurm(cluster, tmp_path):
    words = (LAUNCH.parent / "configs" / "quickstart.yaml", "--run-dir", tmp_path / "run")
    job, out = submit(cluster, tmp_path, *words, environment={"PYTHONPATH": str(LAUNCH.parent)})
    assert ended(cluster, job, 3600) == 0, out.read_text()[-3000:]
    values = [json.loads(line)["value"] for line in (tmp_path / "run" / "eval.jsonl").read_text().splitlines()]
    assert values[0] < 0.5
    assert values[-1] > 0.75
    assert "launcher |" not in out.read_text()
