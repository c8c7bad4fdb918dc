"""The JobSet manifest against the published schemas of Job and Pod, and our own of the JobSet around them."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import jobset
import jsonschema
import kubernetes_validate
import pytest
from jobset_schema import JOBSET

SCRIPT = Path(__file__).parents[2] / "launch" / "jobset.py"
WORDS = [
    *("run", "configs/quickstart.yaml", "seed=7", "--image", "registry/jaxrl:1", "--claim", "runs", "--secret", "keys"),
    *("--trainer", "v5e:4x4", "--sampler", "v5e:2x4", "--samplers", "3", "--queue", "tpus"),
]
KUBERNETES = "1.37"


def made(*more):
    return jobset.manifest(jobset.parsed([*WORDS, *more]))


def check(manifest):
    """Raises what a strict server would refuse."""
    jsonschema.validate(manifest, JOBSET)
    names = [job["name"] for job in manifest["spec"]["replicatedJobs"]]
    assert set(manifest["spec"]["successPolicy"]["targetReplicatedJobs"]) <= set(names)
    for job in manifest["spec"]["replicatedJobs"]:
        alone = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}
        kubernetes_validate.validate(alone, KUBERNETES, strict=True)


@pytest.mark.parametrize("more", [(), ("--trainer", "gpu:2:8", "--sampler", "gpu:1:8"), ("--trainer", "v5p:2x2x1")])
def test_it_is_valid(more):
    check(made(*more))


TYPOS = [
    ("apiVersion", "jobset.x-k8s.io/v1"),
    ("spec.network.enableDnsHostnames", True),
    ("spec.successPolicy.operator", "all"),
    ("spec.successPolicy.targetReplicatedJobs", ["trainers"]),
    ("spec.failurePolicy.maxRestart", 3),
    ("spec.replicatedJobs.0.replica", 1),
    ("spec.replicatedJobs.0.template.spec.completionMode", 1),
    ("spec.replicatedJobs.0.template.spec.backOffLimit", 0),
    ("spec.replicatedJobs.0.template.spec.template.spec.restartpolicy", "Never"),
    ("spec.replicatedJobs.1.template.spec.template.spec.containers.0.images", "x"),
    ("spec.replicatedJobs.1.template.spec.template.spec.containers.0.env", [{"name": "A", "valueFrom": {"field": 1}}]),
    ("spec.replicatedJobs.1.template.spec.template.spec.containers.0.ports.0.containerPort", "8478"),
    ("spec.replicatedJobs.1.template.spec.template.spec.volumes.1.secret.secretname", "keys"),
]


@pytest.mark.parametrize(("path", "value"), TYPOS, ids=[path for path, _ in TYPOS])
def test_typos_are_caught(path, value):
    manifest = copy.deepcopy(made())
    *way, last = path.split(".")
    place = manifest
    for key in way:
        place = place[int(key) if isinstance(place, list) else key]
    place[last] = value
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError, AssertionError)):
        check(manifest)


def container(manifest, index):
    return manifest["spec"]["replicatedJobs"][index]["template"]["spec"]["template"]["spec"]["containers"][0]


def test_who_is_where():
    manifest = made()
    trainer, sampler = manifest["spec"]["replicatedJobs"]
    assert (trainer["replicas"], trainer["template"]["spec"]["completions"]) == (1, 4)  # 16 chips, 4 on a host
    assert (sampler["replicas"], sampler["template"]["spec"]["completions"]) == (3, 1)
    env = {each["name"]: each.get("value") for each in container(manifest, 0)["env"]}
    assert env["JAXRL_COORDINATOR"] == "run-trainer-0-0.run:8476"
    assert env["JAXRL_PROCESSES"] == "4"
    assert container(manifest, 0)["resources"]["limits"] == {"google.com/tpu": "4"}
    assert container(manifest, 1)["resources"]["limits"] == {"google.com/tpu": "8"}
    # Both sides get the same configuration, and the address that the trainer gives out is the one samplers dial.
    train, sample = container(manifest, 0)["command"], container(manifest, 1)["command"][2]
    assert train[:4] == ["jaxrl", "train", "configs/quickstart.yaml", "seed=7"]
    assert sample.startswith("exec jaxrl sampler configs/quickstart.yaml seed=7 --trainer run-trainer-0-0.run:8477 ")
    assert sample.endswith('--advertise "$HOSTNAME.run:8478"')
    assert "sampler.remote.advertise=run-trainer-0-0.run:8477" in train
    # A trainer of one pod is no world of several processes.
    assert container(made("--trainer", "v5e:2x4"), 0)["env"] == []


def test_the_script_prints_it_and_the_certificate_s_names():
    printed = subprocess.run([sys.executable, SCRIPT, *WORDS], capture_output=True, text=True, check=True).stdout
    assert json.loads(printed) == made()
    names = subprocess.run(
        [sys.executable, SCRIPT, *WORDS, "--names"], capture_output=True, text=True, check=True
    ).stdout
    assert names.split() == ["run-trainer-0-0.run", *(f"run-sampler-{i}-0.run" for i in range(3))]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--trainer", "v5e:3x5"), "--trainer: invalid hardware value: 'v5e:3x5'"),
        (("--trainer", "v7:2x2"), "invalid hardware value"),
        (("--trainer", "gpu:8"), "invalid hardware value"),
        (("--sampler", "v5e:4x4"), "--sampler takes 4 pods; a sampler is one process"),
        (("--samplers", "0"), "--samplers must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(more, message, capsys):
    with pytest.raises(SystemExit):
        made(*more)
    assert message in capsys.readouterr().err


def test_a_name_that_kubernetes_refuses_is_refused(capsys):
    with pytest.raises(SystemExit):
        jobset.parsed(["Run_1", *WORDS[1:]])
    assert "'Run_1': at most 40 lower-case letters" in capsys.readouterr().err
