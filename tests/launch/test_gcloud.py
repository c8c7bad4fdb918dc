"""launch/gcloud.py against a gcloud that plays the TPU VMs with folders of this machine."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch" / "gcloud.py"

# Every VM is a folder; `ssh` runs its command there, `scp` copies there. What it was called with is written down.
FAKE = """#!{python}
import json, os, pathlib, shutil, subprocess, sys
words = sys.argv[1:]
root = pathlib.Path({root!r})
with open(root / "calls.jsonl", "a") as calls:
    calls.write(json.dumps(words) + "\\n")
assert words[:3] == ["compute", "tpus", "tpu-vm"], words
verb, *rest = words[3:]
options = dict(word[2:].partition("=")[::2] for word in rest if word.startswith("--"))
plain = [word for word in rest if not word.startswith("--")]
assert options["zone"] == "here" and "quiet" in options
if verb == "describe":
    print("10.0.0.1;10.0.0.2" if plain[0].endswith("trainer") else "10.0.1.0")
if verb == "scp":
    host, _, path = plain[1].partition(":")
    (root / host).mkdir(exist_ok=True)
    copy = shutil.copytree if "recurse" in options else shutil.copy
    copy(plain[0], root / host / (path or pathlib.Path(plain[0]).name))
if verb == "ssh":
    (root / plain[0]).mkdir(exist_ok=True)
    os.chdir(root / plain[0])
    os.execvp("bash", ["bash", "-c", options["command"]])
"""
# In the place of jaxrl: the trainer waits for a file or a signal, the sampler dies once.
JAXRL = """#!{python}
import os, pathlib, signal, sys, time
print("jaxrl", *sys.argv[1:], flush=True)
def stop(*_):
    print("stopping", flush=True)
    sys.exit(130)
signal.signal(signal.SIGTERM, stop)
if sys.argv[1] == "sampler" and not os.path.exists("lived"):
    pathlib.Path("lived").write_text("")
    sys.exit(1)
end = time.monotonic() + 60
while time.monotonic() < end and not os.path.exists({end!r}):
    time.sleep(0.02)
"""


@pytest.fixture
def cloud(tmp_path):
    """(folder of the VMs, environment) with everything installed."""
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "gcloud"
    fake.write_text(FAKE.format(python=sys.executable, root=str(tmp_path)))
    fake.chmod(0o755)
    for name in ("run-trainer", "run-sampler-0"):
        program = tmp_path / name / "jaxrl-venv" / "bin" / "jaxrl"
        program.parent.mkdir(parents=True)
        program.write_text(JAXRL.format(python=sys.executable, end=str(tmp_path / "end")))
        program.chmod(0o755)
        (tmp_path / name / "jaxrl").mkdir()
    return tmp_path, os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}


def started(cloud, *words):
    folder, environment = cloud
    command = [sys.executable, SCRIPT, *words, "--zone", "here"]
    return subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True)


RUN = ("run", "run", "configs/quickstart.yaml", "seed=7", "--run-dir", "/shared/run")


def wait_for_line(process, wanted):
    for line in process.stdout:
        if wanted in line:
            return line
    raise AssertionError(f"it ended without {wanted!r}")


def test_a_run_starts_everything_restarts_a_sampler_and_ends(cloud):
    folder, _ = cloud
    with started(cloud, *RUN) as process:
        train = wait_for_line(process, "jaxrl train")
        wait_for_line(process, "sampler-0 ended with status 1; it is started again in 1 s")
        sample = wait_for_line(process, "jaxrl sampler")
        (folder / "end").write_text("")
        process.stdout.read()
    assert process.returncode == 0
    assert "device.distributed.coordinator=auto" in train  # the trainer's slice has two hosts
    assert "sampler.remote.advertise=10.0.0.1:8477" in train
    assert " --trainer 10.0.0.1:8477 --listen 0.0.0.0:8478 --advertise 10.0.1.0:8478 " in sample
    for name in ("run-trainer", "run-sampler-0"):
        assert {p.name for p in (folder / name / "jaxrl-credentials").iterdir()} == {"token", "cert.pem", "key.pem"}
    certificate = folder / "run-trainer" / "jaxrl-credentials" / "cert.pem"
    command = ["openssl", "x509", "-noout", "-ext", "subjectAltName", "-in", certificate]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert all(f"IP Address:{address}" in told.stdout for address in ("10.0.0.1", "10.0.0.2", "10.0.1.0"))


def test_a_stop_reaches_the_trainer_s_hosts(cloud):
    with started(cloud, *RUN) as process:
        wait_for_line(process, "jaxrl train")
        process.send_signal(signal.SIGTERM)
        out = process.stdout.read()
    assert "run-trainer | stopping" in out
    assert process.returncode == 130


def test_what_ran_before_on_a_host_is_ended_first(cloud):
    folder, _ = cloud
    old = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)  # jaxrl train"], cwd=folder / "run-trainer"
    )
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        (folder / "run-trainer" / "jaxrl.pid").write_text(f"{old.pid}\n")
        (folder / "run-sampler-0" / "jaxrl.pid").write_text(f"{other.pid}\n")  # a number that is somebody else's now
        (folder / "end").write_text("")
        with started(cloud, *RUN) as process:
            process.stdout.read()
        assert old.wait(10) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        old.kill(), other.kill()
        old.wait(), other.wait()


def test_slices_are_made_filled_and_deleted(cloud):
    folder, _ = cloud
    made = ("create", "run", "--trainer", "v5litepod-16", "--sampler", "v5litepod-8", "--samplers", "2", "--spot")
    for words in (made, ("delete", "run", "--samplers", "2")):
        with started(cloud, *words) as process:
            process.stdout.read()
        assert process.returncode == 0
    calls = [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]
    names = ["run-trainer", "run-sampler-0", "run-sampler-1"]
    assert [call[4] for call in calls] == names * 2
    assert [call[3] for call in calls] == ["create"] * 3 + ["delete"] * 3
    assert [call[5] for call in calls[:2]] == ["--accelerator-type=v5litepod-16", "--accelerator-type=v5litepod-8"]


def test_a_dry_run_calls_nothing(cloud):
    folder, _ = cloud
    with started(cloud, *RUN, "--dry-run") as process:
        out = process.stdout.read()
    assert process.returncode == 0
    assert not (folder / "calls.jsonl").exists()
    assert out.count("gcloud compute tpus tpu-vm ssh") == 2
