"""Several processes: where a process stands, the meeting before JAX connects, and `jaxrl sft` on the loopback."""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from tiny_run import TINY

from jaxrl_llm.cli.agreement import config_facts
from jaxrl_llm.cli.devices import Place, own_place
from jaxrl_llm.cli.rendezvous import meet
from jaxrl_llm.config import DeviceConfig, DistributedConfig, RunConfig
from jaxrl_llm.types import UserError

COMMAND = [sys.executable, "-c", "from jaxrl_llm.cli.main import main; main()"]
SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "node[07-09]",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def device(**distributed):
    return DeviceConfig(distributed=DistributedConfig(**distributed))


def test_a_process_finds_its_place():
    env = {"JAXRL_COORDINATOR": "there:99", "JAXRL_PROCESSES": "4", "JAXRL_PROCESS_ID": "3"}
    assert own_place(device(), {}) == Place()
    assert own_place(device(), env) == Place(3, 4, ("there", 99))
    assert own_place(device(coordinator="[::1]:8", process_id=0), env) == Place(0, 4, ("[::1]", 8))


def test_slurm_is_detected(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    # JAX's own rule: the first node of the list, a port made from the job's number, one process per local GPU.
    assert own_place(device(coordinator="auto"), {}) == Place(2, 3, ("node07", 61441), [0])


@pytest.mark.parametrize(
    ("distributed", "environment", "message"),
    [
        ({"processes": 2}, {}, "device.distributed.processes .* set without a coordinator"),
        ({"coordinator": "there:99", "processes": 2}, {}, "process_id is not set and .* no JAXRL_PROCESS_ID"),
        ({"coordinator": "there", "processes": 2, "process_id": 0}, {}, "'there' is not of the form host:port"),
        ({"coordinator": "there:0", "processes": 2, "process_id": 0}, {}, "not of the form host:port"),
        ({"coordinator": "there:99", "processes": 2, "process_id": 2}, {}, "process 2 of 2 cannot be"),
        (
            {"coordinator": "there:99", "processes": 2},
            {"JAXRL_PROCESS_ID": "x"},
            "JAXRL_PROCESS_ID = 'x' is not a whole",
        ),
        ({"coordinator": "auto", "process_id": 1}, {}, "finds out device.distributed.process_id itself"),
        ({"coordinator": "auto"}, {}, "no cluster that JAX detects"),
    ],
)
def test_a_place_that_cannot_be_says_why(distributed, environment, message):
    with pytest.raises(UserError, match=message):
        own_place(device(**distributed), environment)


def gathering(*guests, timeout_s=20.0):
    """What `meet` said to each of (index, count, facts): a message, or "together"."""
    address, heard = ("127.0.0.1", free_port()), queue.Queue()

    def come(number, index, count, facts):
        try:
            meet(address, index, count, facts, timeout_s=timeout_s)
            heard.put((number, "together"))
        except UserError as error:
            heard.put((number, str(error)))

    threads = [threading.Thread(target=come, args=(number, *guest)) for number, guest in enumerate(guests)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [message for _, message in sorted(heard.get() for _ in guests)]


def test_processes_that_belong_together_meet():
    assert gathering((2, 3, {"a": "1"}), (0, 3, {"a": "1"}), (1, 3, {"a": "1"})) == ["together"] * 3


def test_all_hear_what_differs():
    said = gathering(
        (0, 3, {"jax": "1", "seed": "0"}), (1, 3, {"jax": "1", "seed": "0"}), (2, 3, {"jax": "2", "seed": "0"})
    )
    assert len(set(said)) == 1
    assert said[0].startswith("process 2 differs from process 0 in jax (1 in process 0, 2); start all")


def test_another_number_of_processes_is_named_to_both(monkeypatch):
    monkeypatch.setattr("jaxrl_llm.cli.rendezvous._GRACE_S", 0.5)
    said = gathering((0, 2, {}), (1, 3, {}))
    assert said == ["process 1 was started as one of 3 processes, process 0 as one of 2"] * 2
    said = gathering((0, 3, {}), (1, 3, {}), (1, 3, {}))
    assert said == ["two processes were started as process 1 of 3"] * 3


def test_nobody_waits_for_ever():
    began = time.monotonic()
    assert "of process 2 nothing was heard" in gathering((0, 3, {}), (1, 3, {}), timeout_s=1.0)[1]
    assert "process 1 of 2 did not reach process 0 at 127.0.0.1" in gathering((1, 2, {}), timeout_s=0.5)[0]
    assert time.monotonic() - began < 10


def test_a_stranger_at_the_port_is_not_counted():
    address, heard = ("127.0.0.1", free_port()), []
    threads = [
        threading.Thread(target=lambda i=i: heard.append(meet(address, i, 2, {}, timeout_s=20.0))) for i in (0, 1)
    ]
    threads[0].start()
    while True:
        try:
            with socket.create_connection(address) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert heard == [None, None]


def test_facts_name_config_keys_packages_and_code():
    one, other = config_facts(RunConfig()), config_facts(RunConfig(seed=1))
    assert {key for key in one if one[key] != other[key]} == {"seed"}
    assert one.keys() >= {"package jax", "package jaxlib", "Python", "the code of jaxrl_llm", "model.layers"}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "tiny.yaml"
    four = TINY.replace("cpu_devices: 8", "cpu_devices: 2").replace("microbatch_rows: 2", "microbatch_rows: 4")
    path.write_text(four.replace("train: {", "train: {mesh: {data: 2, fsdp: 2}, "))
    return path


def start(count, command, *arguments, each=((), ())):
    """Processes of one `jaxrl` command; `each` are further arguments of the first and the others."""
    address = f"127.0.0.1:{free_port()}"
    started = []
    for index in range(count):
        places = {"JAXRL_COORDINATOR": address, "JAXRL_PROCESSES": str(count), "JAXRL_PROCESS_ID": str(index)}
        started.append(
            subprocess.Popen(
                [*COMMAND, command, *map(str, arguments), *each[min(index, 1)]],
                env=os.environ | places,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return started


def ended(started, timeout=240):
    """(exit status, stdout, stderr) of each."""
    try:
        return [(p.returncode, out, err) for p in started for out, err in [p.communicate(timeout=timeout)]]
    finally:
        for process in started:
            process.kill()


def test_sft_over_two_processes_stops_together_and_ends(config, records):
    run = config.parent / "run"
    started = start(2, "sft", config, "sft.steps=100000", "--run-dir", run)
    path, deadline = run / "sft.jsonl", time.monotonic() + 240
    while not path.exists() or path.read_text().count("\n") < 3:
        assert time.monotonic() < deadline
        assert all(p.poll() is None for p in started), ended(started)
        time.sleep(0.05)
    started[1].send_signal(signal.SIGTERM)
    (status, _, err), (other_status, other_out, _) = ended(started)
    assert (status, other_status) == (130, 130), err
    assert "stopping after this step" in other_out
    assert "warm-up step" not in other_out  # process 0 alone speaks and writes
    assert json.loads((run / "state.json").read_text())["state"] == "interrupted"

    done = config.parent / "done"
    for status, _, err in ended(start(2, "sft", config, "sft.steps=4", "--run-dir", done)):
        assert status == 0, err
    assert [record["step"] for record in records(done, "sft")] == [1, 2, 3, 4]
    assert json.loads((done / "environment.json").read_text())["processes"] == 2
    assert json.loads((done / "state.json").read_text())["state"] == "finished"
    assert sorted(p.name for p in (done / "checkpoints").iterdir()) == ["step_00000000"]


def test_processes_of_different_configurations_are_refused_before_anything_is_written(config):
    run = config.parent / "run"
    for status, _, err in ended(start(2, "sft", config, "--run-dir", run, each=((), ("sft.lr=1e-3",)))):
        assert status == 2
        assert err.splitlines()[-1].startswith(
            "error: process 1 differs from process 0 in sft.lr (0.003 in process 0, 0.001)"
        )
    assert not run.exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), "jaxrl train over 2 processes, which share all their devices, does not sample in any of them"),
        (("sampler.workers=[127.0.0.1:9]", "sampler.remote.local=true"), "leave sampler.remote.local out"),
        (("sampler.workers=[127.0.0.1:9]", "sampler.remote.transfer=true"), "put together on the host of the first"),
        (
            ("sampler.workers=[127.0.0.1:9]", "rollout.rewards={model: 1}", "rollout.reward_model.path=judge"),
            "a reward model needs a trainer of one process",
        ),
    ],
)
def test_training_over_several_processes_needs_samplers_of_its_own(overrides, message, config, jaxrl, monkeypatch):
    for name, value in (("COORDINATOR", "127.0.0.1:9"), ("PROCESSES", "2"), ("PROCESS_ID", "0")):
        monkeypatch.setenv(f"JAXRL_{name}", value)
    status, _, err = jaxrl("train", config, *overrides, "--run-dir", config.parent / "run")
    assert status == 2
    assert message in err
    assert not (config.parent / "run").exists()


@pytest.mark.parametrize("wrong", ["eval.every=3", "train.steps=10"])
def test_samplers_cannot_evaluate_versions_they_never_get(wrong, config, jaxrl):
    fine = ("eval.every=4", "train.steps=8", "rollout.mode=ppo_off_policy", "rollout.max_lag=4")
    run = config.parent / "run"
    status, _, err = jaxrl("train", config, "sampler.workers=[127.0.0.1:9]", *fine, wrong, "--run-dir", run)
    assert status == 2
    assert "gives samplers one version in rollout.max_lag = 4, and they evaluate too" in err
    assert not run.exists()
