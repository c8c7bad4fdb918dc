"""One of several processes that train the tiny policy: port, index, processes, mesh as JSON, folder."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from tiny_policy import ADAMW, CISPO, HEAD_CHUNK, MODEL, TEMPERATURE, documents, make_batch

from jaxrl_llm import global_arrays
from jaxrl_llm.checkpoints.orbax import CheckpointStore
from jaxrl_llm.cli.devices import Place, configure_jax, join_processes
from jaxrl_llm.config import DeviceConfig
from jaxrl_llm.global_arrays import to_host
from jaxrl_llm.sharding import make_mesh
from jaxrl_llm.train.state import abstract_state, state_from_params
from jaxrl_llm.train.step import make_score, make_train_step


def main(port, index, count, axes, folder):
    device = DeviceConfig(platform="cpu", cpu_devices=2)
    configure_jax(device)
    world = join_processes(device, Place(index, count, ("127.0.0.1", port)), {})
    mesh = make_mesh(axes, jax.devices())
    assert mesh.is_multi_process
    how = {"mesh": mesh, "temperature": TEMPERATURE, "head_chunk": HEAD_CHUNK}
    step = make_train_step(MODEL, ADAMW, CISPO, remat="none", **how)
    params = dict(np.load(folder / "params.npz"))
    params = (
        {"layers": {}}
        | {k: v for k, v in params.items() if "." not in k}
        | {"layers": {k.partition(".")[2]: v for k, v in params.items() if "." in k}}
    )
    state = state_from_params(MODEL, ADAMW, mesh=mesh, params=params)
    abstract = abstract_state(MODEL, ADAMW, mesh=mesh)
    step = step.compiled(abstract, make_batch(documents(0)))
    world.gather("compiling", "")
    store = CheckpointStore(folder / f"of_{count}", keep=2, world=world)
    losses = []
    for number in range(5):
        state, metrics = step(state, make_batch(documents(number)))
        losses.append(float(metrics["loss"]))
        if number == 1:
            store.save(2, state, {"cursor": 2}, {})
            _, state, extras = store.restore_latest(abstract, fingerprints={})
            assert extras == {"cursor": 2}
    store.save(5, state, {}, {})
    batch = make_batch(documents(9))
    score = make_score(MODEL, **how)
    fields = (batch.tokens, batch.targets, batch.positions, batch.segment_ids)
    logprobs = to_host(score(state.params, *(x.reshape(-1, x.shape[-1])[:8] for x in fields)))
    leaves = jax.tree.leaves(state.params)
    one_by_one = [to_host(leaf) for leaf in leaves]
    for limit in (2**26, 1500, 1):  # all in one exchange, some, none
        global_arrays._PART_BYTES = limit
        for one, other in zip(one_by_one, global_arrays.each_to_host([*leaves, np.arange(3)]), strict=False):
            assert (one == other).all()
    agreed = [world.any_process(index == count - 1), world.any_process(False)]
    shared = world.from_first([np.float32([np.nan, -0.0, 1e-45]) * world.first, np.int32(world.first * 7)])
    shared = [x.tobytes().hex() for x in shared]
    heard = [heard_by(world, text) for text in ("one", "two")]
    agreed.append(world.any_process(False))
    heard.append(heard_by(world, "three"))
    (folder / f"of_{count}_{index}.json").write_text(
        json.dumps(
            {"losses": losses, "logprobs": logprobs.tolist(), "agreed": agreed, "shared": shared, "heard": heard}
        )
    )


def heard_by(world, text):
    if not world.first:
        return world.hear()
    world.announce(text)
    return text


if __name__ == "__main__":
    port, index, count, axes, folder = sys.argv[1:]
    main(int(port), int(index), int(count), json.loads(axes), Path(folder))
