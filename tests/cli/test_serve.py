"""`jaxrl serve` as a process: what it refuses, what it says, what it serves, how it ends."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from policy_reference import make_run, weights
from tiny_run import TINY

from jaxrl_llm.sampler.proto import rl_pb2
from jaxrl_llm.sampler.scheduler import Scheduler
from jaxrl_llm.sampler.serving.client import SamplerClient
from jaxrl_llm.types import SampleRequest, Sampling

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def run_and_setup(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    (folder / "tiny.yaml").write_text(TINY)
    return folder / "run", make_run(folder / "tiny.yaml", folder / "run", steps=(3,))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "refusing to listen on 0.0.0.0 without a token"),
        (["--host", "0.0.0.0", "--token-file", "{folder}/token"], "without TLS"),
        (["--tls-cert", "{folder}/token"], "go together"),
        (["--token-file", "{folder}/none"], "cannot be read"),
    ],
)
def test_an_unsafe_or_impossible_start_is_one_clear_line(run_and_setup, jaxrl, arguments, message):
    run, _ = run_and_setup
    (run.parent / "token").write_text(TOKEN)
    status, out, err = jaxrl("serve", run, *(argument.format(folder=run.parent) for argument in arguments))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert TOKEN not in err


def test_a_served_run_answers_at_every_door_and_stops_on_a_signal(run_and_setup):
    run, setup = run_and_setup
    command = [sys.executable, "-c", "from jaxrl_llm.cli.main import main; main()"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "JAXRL_SERVE_TOKEN": TOKEN}
    process = subprocess.Popen(
        # The trainer's mesh would need more devices than there are: nobody trains here.
        [*command, "serve", str(run), "train.mesh={data: 64}", "--port", "0", "--http-port", "0", "--name", "sums"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    alarm = threading.Timer(120, process.kill)  # so that no silence can outlast the suite's patience
    alarm.start()
    try:
        lines = [process.stdout.readline() for _ in range(4)]
        assert "step 3 in" in lines[0], (lines, process.stderr.read() if process.poll() is not None else "")
        assert "503" in lines[1]
        grpc_port = re.search(r"gRPC on 127\.0\.0\.1:(\d+) .*jetstream_proto.Orchestrator.*a token", lines[2])[1]
        http_port = re.search(r"HTTP on http://127\.0\.0\.1:(\d+)/v1 \(model 'sums'", lines[3])[1]

        prompt = setup.tokenizer.encode("3+4=")
        scheduler = Scheduler(setup.engine, weights(setup, 3), version=3)
        scheduler.submit([SampleRequest(np.array(prompt, np.int32), Sampling(3), 5)])
        ((_, wanted),) = scheduler.drain()
        with SamplerClient(f"localhost:{grpc_port}", token=TOKEN) as client:
            (mine,) = client.sample(prompt, Sampling(3), [rl_pb2.Draw(seed=5)])
        np.testing.assert_array_equal(mine.tokens_T, wanted.tokens_T)
        np.testing.assert_allclose(mine.logprobs_T, wanted.logprobs_T, atol=1e-6)

        connection = http.client.HTTPConnection("127.0.0.1", int(http_port), timeout=20)
        body = {"model": "sums", "prompt": "3+4=", "max_tokens": 3, "seed": 5, "return_token_ids": True}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        assert json.loads(connection.getresponse().read())["choices"][0]["token_ids"] == wanted.tokens_T.tolist()
        connection.request("POST", "/v1/completions", json.dumps(body | {"logprobs": 5, "echo": True}), headers)
        scores = json.loads(connection.getresponse().read())["choices"][0]["logprobs"]
        assert len(scores["token_logprobs"]) == len(prompt) + len(wanted.tokens_T)
        connection.close()
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    finally:
        alarm.cancel()
        process.kill()
        process.wait()
    assert (process.returncode, out.startswith("stopping")) == (0, True), err
    assert TOKEN not in "".join(lines) + out + err
