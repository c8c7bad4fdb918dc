"""A trainer and samplers as real processes on the loopback, and what may happen to them."""

import json
import random
import signal
from collections import Counter

import pytest
from bad_network import Relay, free_port
from tiny_run import TINY
from world_processes import Processes, check_books, go_on, stop, where

from jaxrl_llm.cli.assemble import assemble_sampler
from jaxrl_llm.cli.worlds import facts, wire_form
from jaxrl_llm.config import load

FAST = ("sampler.remote.heartbeat_s=0.3", "sampler.remote.silence_s=3", "sampler.remote.retry_s=0.2")
ALWAYS = ("sampler.remote.verify_every=1",)  # every sampler reads every version back and digests it


@pytest.fixture
def processes(tmp_path):
    config = tmp_path / "tiny.yaml"
    small = TINY.replace("cpu_devices: 8", "cpu_devices: 2").replace("max_lag: 0", "max_lag: 2")
    config.write_text(small.replace("steps: 150", "steps: 20"))
    with Processes(tmp_path, config) as started:
        yield started


def test_trainer_and_sampler_agree_on_the_heads_dtype(tiny):
    setup = assemble_sampler(load(tiny, ["model.head_dtype=bfloat16"]))
    told = facts(setup, wire_form(setup.config, setup.config.sampler.remote, setup.engine.mesh))
    assert told["model.head_dtype"] == "bfloat16"


def test_samplers_that_die_stop_or_do_not_belong_change_nothing_that_is_trained(processes):
    far = ("train.steps=1000000", "eval.every=1000000", "checkpoint.every=1000000")
    trainer = processes.train(*far, *FAST, *ALWAYS)
    first = processes.sampler()
    processes.until(lambda: processes.kinds()["joined"] == 1, trainer, first)
    second = processes.sampler()  # which finds compiled what the first one had to compile
    processes.until(lambda: processes.kinds()["joined"] == 2, trainer, first, second)
    other_model = processes.sampler("model.d_ff=128")
    third = processes.sampler()

    processes.until(lambda: len(processes.metrics()) > 5, trainer, first, second)
    killed = where(first)
    first.kill()
    processes.until(lambda: processes.kinds()["left"] == 1, trainer, second)
    processes.until(lambda: processes.kinds()["joined"] == 3, trainer, second, third)  # in the place of the first

    stopped = where(second)
    stop(second)
    at = len(processes.metrics())
    processes.until(lambda: processes.kinds()["left"] == 2, trainer, third)
    go_on(second)
    processes.until(lambda: processes.kinds()["joined"] == 4, trainer, second, third)
    processes.until(lambda: len(processes.metrics()) > at + 5, trainer, second, third)
    assert processes.ended(other_model) == 2
    trainer.send_signal(signal.SIGTERM)
    assert processes.ended(trainer) == 130, trainer.said()

    assert processes.kinds() - Counter(retried=10**6) == Counter(joined=4, left=2, refused=1), processes.events()
    lost, silent = processes.messages("left")
    assert lost == f"sampler {killed} left: the connection is gone or was refused"
    assert silent == f"sampler {stopped} left: it has not answered for 3 s"
    assert f"sampler {stopped} (life 2) joined with version" in processes.messages("joined")[3]
    assert "has another model.d_ff (128 there, 64 here)" in processes.messages("refused")[0]
    assert "refuses this sampler" in other_model.said()
    check_books(processes.metrics(), max_lag=2)
    assert json.loads((processes.run / "state.json").read_text())["state"] == "interrupted"


def test_a_trainer_without_samplers_can_be_stopped(processes):
    trainer = processes.train(*FAST)
    state = processes.run / "state.json"
    processes.until(lambda: state.exists() and json.loads(state.read_text())["state"] == "running", trainer)
    trainer.send_signal(signal.SIGTERM)
    assert processes.ended(trainer) == 130, trainer.said()
    assert json.loads((processes.run / "state.json").read_text())["state"] == "interrupted"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--listen", "0.0.0.0:0"], "refusing to listen on 0.0.0.0 without a token"),
        (["--listen", "9000"], "--listen = '9000' is not of the form host:port"),
        (["--trainer", "there"], "--trainer = 'there' is not of the form host:port"),
        (["--trainer", "file:"], "--trainer = 'file:' names no file"),
        (["--advertise", "here"], "--advertise = 'here' is not of the form host:port"),
    ],
)
def test_a_sampler_that_cannot_start_is_one_clear_line(tiny, jaxrl, arguments, message):
    status, out, err = jaxrl("sampler", tiny, *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sampler.workers=[there]", "sampler.workers = 'there' is not of the form host:port"),
        ("sampler.remote.listen=0.0.0.0:0", "refusing to listen on 0.0.0.0 without a token"),
        ("sampler.remote.listen=9000", "sampler.remote.listen = 9000 in"),
        ("sampler.remote.transfer=1", "sampler.remote.transfer = 1 in"),
        ("sampler.remote.advertise=x", "sampler.remote.advertise = 'x' is not"),
    ],
)
def test_a_trainer_that_nobody_could_reach_is_one_clear_line(tiny, jaxrl, override, message):
    status, _, err = jaxrl("train", tiny, override, "--run-dir", tiny.parent / "run")
    assert (status, err.count("\n")) == (2, 1)
    assert message in err
    assert not (tiny.parent / "run").exists()


@pytest.mark.slow
def test_a_run_is_gone_on_with_by_the_samplers_that_wait_for_it(processes):
    far = ("train.steps=1000000", "eval.every=1000000", "checkpoint.every=1000000")
    second, third = processes.sampler(), processes.sampler()
    # At last with a sampler in the trainer's own process beside them.
    for joined, also in ((2, ()), (5, ("sampler.remote.local=true", "sampler.remote.transfer=true"))):
        at = len(processes.metrics())
        trainer = processes.train(*far, *FAST, *ALWAYS, *also)
        processes.until(lambda joined=joined: processes.kinds()["joined"] == joined, trainer, second, third)
        processes.until(lambda at=at: len(processes.metrics()) > at + 3, trainer, second, third)
        trainer.send_signal(signal.SIGTERM)
        assert processes.ended(trainer) == 130, trainer.said()
        check_books(processes.metrics(), max_lag=2)
    for sampler in (second, third):
        sampler.send_signal(signal.SIGTERM)
        assert processes.ended(sampler) == 0, sampler.said()
    assert processes.kinds() == {"joined": 5, "push_fallback": 2}  # these samplers have transfer off


@pytest.mark.slow
def test_the_quickstart_reaches_its_target_whatever_happens_to_its_samplers(tmp_path):
    """Killed, stopped for 20 s, restarted: the run ends at its target, and nothing is trained twice."""
    with Processes(tmp_path, "configs/quickstart.yaml") as processes:
        trainer = processes.train("sampler.remote.silence_s=10", "sampler.remote.heartbeat_s=1", *ALWAYS)
        first, second = processes.sampler(), processes.sampler()
        processes.until(lambda: processes.kinds()["joined"] == 2, trainer, first, second, seconds=900)
        processes.until(lambda: len(processes.metrics()) > 50, trainer, first, second, seconds=900)
        first.kill()
        processes.until(lambda: processes.kinds()["left"] == 1, trainer, second)
        third = processes.sampler()
        processes.until(lambda: processes.kinds()["joined"] == 3, trainer, second, third)
        stop(second)
        processes.until(lambda: processes.kinds()["left"] == 2, trainer, third)
        go_on(second)
        processes.until(lambda: processes.kinds()["joined"] == 4, trainer, second, third)
        assert processes.ended(trainer, seconds=1800) == 0, trainer.said()
        assert processes.ended(second) == processes.ended(third) == 0
        last = [json.loads(line) for line in (processes.run / "eval.jsonl").read_text().splitlines()][-1]
        assert last["value"] > 0.8
        check_books(processes.metrics(), max_lag=8)
        assert processes.kinds() - Counter(retried=10**6) == Counter(joined=4, left=2)


@pytest.mark.slow
def test_the_quickstart_reaches_its_target_over_a_network_that_cuts_pushes_and_delays_answers(tmp_path):
    """Weights are cut off every few versions, halfway through; what the other sampler says comes up to 50 ms late."""
    lengths, port, late_port = random.Random(0), free_port(), free_port()
    with (
        Processes(tmp_path, "configs/quickstart.yaml") as processes,
        Relay(port, cut_after=lambda: lengths.randrange(10**6, 8 * 10**6)) as cutting,
        Relay(late_port, delay_s=0.05) as late,
    ):
        trainer = processes.train(
            *(f"sampler.remote.listen=127.0.0.1:{port}", f"sampler.remote.advertise={cutting.address}"), *ALWAYS
        )
        first = processes.sampler()
        second = processes.sampler("--listen", f"127.0.0.1:{late_port}", "--advertise", late.address)
        assert processes.ended(trainer, seconds=1800) == 0, trainer.said()
        assert processes.ended(first) == processes.ended(second) == 0
        last = [json.loads(line) for line in (processes.run / "eval.jsonl").read_text().splitlines()][-1]
        assert last["value"] > 0.8
        check_books(processes.metrics(), max_lag=8)
        assert cutting.cuts > 20
        # Every version was digested where it arrived: what came in pieces was never sampled with.
        assert "digest" not in "".join(processes.messages("left"))
