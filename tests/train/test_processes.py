"""Real processes on this machine's loopback: the same numbers whatever their number."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_policy import ADAMW, HEAD_CHUNK, MODEL, TEMPERATURE, documents, make_batch

from jaxrl_llm.checkpoints.orbax import CheckpointStore
from jaxrl_llm.train.state import abstract_state
from jaxrl_llm.train.step import make_score

MESHES = {2: {"data": 2, "fsdp": 2}, 4: {"data": 2, "fsdp": 2, "tensor": 2}}
PROGRAM = Path(__file__).parent / "process_steps.py"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, host_params):
    """What 2 and 4 processes of 2 devices leave behind after 5 steps, both at once."""
    folder = tmp_path_factory.mktemp("processes")
    flat = {jax.tree_util.keystr(p, simple=True, separator="."): x for p, x in jax.tree.leaves_with_path(host_params)}
    np.savez(folder / "params.npz", **flat)
    started = []
    for count, axes in MESHES.items():
        port = str(free_port())
        for index in range(count):
            command = [sys.executable, PROGRAM, port, str(index), str(count), json.dumps(axes), folder]
            how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            started.append(subprocess.Popen(command, **how))
    try:
        for process in started:
            out, _ = process.communicate(timeout=300)
            assert process.returncode == 0, out
    finally:
        for process in started:
            process.kill()
    return folder


@pytest.fixture(scope="module")
def alone(one_device):
    """(losses, state after 5 steps, log-probabilities) of one process on one device."""
    step, new_state = one_device
    state, losses = new_state(), []
    for number in range(5):
        state, metrics = step(state, make_batch(documents(number)))
        losses.append(float(metrics["loss"]))
    batch = make_batch(documents(9))
    score = make_score(MODEL, mesh=step.mesh, temperature=TEMPERATURE, head_chunk=HEAD_CHUNK)
    fields = (batch.tokens, batch.targets, batch.positions, batch.segment_ids)
    return losses, state, np.asarray(score(state.params, *(x.reshape(-1, x.shape[-1])[:8] for x in fields)))


@pytest.mark.parametrize("count", [2, 4])
def test_several_processes_train_and_score_as_one_on_one_device(count, folder, alone, one_device):
    losses, state, logprobs = alone
    # They saved and restored after step 2; one process restores, on one device, what they saved together after step 5.
    wanted = abstract_state(MODEL, ADAMW, mesh=one_device[0].mesh)
    step, theirs, _ = CheckpointStore(folder / f"of_{count}", keep=2).restore_latest(wanted, fingerprints={})
    assert step == 5
    for (path, a), b in zip(jax.tree.leaves_with_path(theirs.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5, err_msg=jax.tree_util.keystr(path))
    told = [json.loads((folder / f"of_{count}_{index}.json").read_text()) for index in range(count)]
    assert all(each == told[0] for each in told)  # metrics and stop signals are the same in every process
    assert told[0]["agreed"] == [True, False, False]
    # What the first process says and gives arrives in order and bit for bit (NaN, -0, a subnormal; 7).
    assert told[0]["heard"] == ["one", "two", "three"]
    assert told[0]["shared"] == [np.float32([np.nan, -0.0, 1e-45]).tobytes().hex(), np.int32(7).tobytes().hex()]
    np.testing.assert_allclose(told[0]["losses"], losses, rtol=0, atol=1e-5)
    np.testing.assert_allclose(told[0]["logprobs"], logprobs, rtol=0, atol=1e-4)
