"""How long does a push of weights take, against a plain copy of the same bytes in memory?

    python benchmarks/pipeline/push.py [--rounds 9] [--width 512] [--layers 8]

Inside one process (the sampler's own copy, as `jaxrl train` makes it), and to another process on the loopback, in
chunks over gRPC and from device to device; each round measures all of them in turn. `ready` is what a sampler needs
from the offer until it could commit: fetch, digests, its own copy. The plain copy is into fresh memory, as any push
is. Prints one JSON object.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from jaxrl_llm.config import ModelConfig
from jaxrl_llm.models.transformer import init_params
from jaxrl_llm.sampler.engine import PolicyEngine
from jaxrl_llm.sampler.proto.methods import add_servicer
from jaxrl_llm.sampler.serving.access import check_access
from jaxrl_llm.sampler.serving.grpc_server import start_server
from jaxrl_llm.sampler.wire_form import WireForm
from jaxrl_llm.sharding import make_mesh
from jaxrl_llm.weights.snapshot import device_leaves, named, take_snapshot
from jaxrl_llm.weights.transfer import Borrower, Lender
from jaxrl_llm.worlds.borrowing import borrow
from jaxrl_llm.worlds.dialling import Credentials
from jaxrl_llm.worlds.pulling import pull
from jaxrl_llm.worlds.servicers import WeightsServicer
from jaxrl_llm.worlds.shelf import Shelf

HOST = "127.0.0.1"


def sizes(arguments):
    width = arguments.width
    return ModelConfig(
        layers=arguments.layers,
        d_model=width,
        heads=width // 64,
        kv_heads=width // 64,
        head_dim=64,
        d_ff=4 * width,
        vocab_size=8192,
        max_context=64,
    )


def engine_and_wire(model):
    mesh = make_mesh({"data": 1, "tensor": 1}, jax.devices()[-1:])
    engine = PolicyEngine(
        model, mesh=mesh, slots=2, decode_steps=1, max_prompt_tokens=16, max_new_tokens=16, eos_id=1, dtype="float32"
    )
    return engine, WireForm(model, mesh, dtype="float32", int8=False)


def timed(work):
    started = time.perf_counter()
    result = jax.block_until_ready(work())
    return time.perf_counter() - started, result


def plain_copy(arrays):
    return [np.array(array) for array in arrays]


async def sampler(model, address):
    """The other process: a round for every line of its input."""
    engine, wire = engine_and_wire(model)
    borrower, credentials = Borrower(HOST, list(engine.mesh.devices.flat)), Credentials()
    for line in sys.stdin:
        version, digest = line.split()
        what = credentials, address, int(version), digest, wire.shapes
        row = {}
        for name in ("grpc", "transfer"):
            started = time.perf_counter()
            if name == "grpc":
                snapshot = await pull(*what, patience_s=600)
            else:
                snapshot = await borrow(credentials, borrower, *what[1:], patience_s=600)
            row[f"{name}_fetch_s"] = time.perf_counter() - started
            leaves = snapshot.on_device or {leaf.path: leaf.array for leaf in snapshot.leaves}
            load_s, _ = timed(lambda leaves=leaves: engine.load_params(wire.rebuild(leaves)))
            row[f"{name}_ready_s"] = row[f"{name}_fetch_s"] + load_s
        row["copy_there_s"], _ = timed(lambda snapshot=snapshot: plain_copy([leaf.array for leaf in snapshot.leaves]))
        print(json.dumps(row), flush=True)


async def trainer(arguments, model):
    engine, wire = engine_and_wire(model)
    params = jax.device_put(init_params(model, 0), jax.devices()[0])
    shelf, lender = Shelf(), Lender(HOST)
    access = check_access(HOST, None, None, None)
    add = lambda server: add_servicer(WeightsServicer(shelf, lender), server, "Weights")  # noqa: E731
    server, port = await start_server(add, access, port=0, max_calls=8)
    command = [sys.executable, __file__, "--sampler", f"{HOST}:{port}", *sys.argv[1:]]
    child = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    arrays, rows = [array for _, array in named(params)], []
    try:
        for version in range(arguments.rounds + 1):
            row = {
                "copy_s": timed(lambda: plain_copy(arrays))[0],
                "in_process_s": timed(lambda: engine.load_params(params))[0],
            }
            row["wire_s"], sent = timed(lambda: wire.make(params))
            started = time.perf_counter()
            snapshot = take_snapshot(version, named(sent))
            row["digest_s"] = time.perf_counter() - started
            shelf.put(type(snapshot)(version, snapshot.leaves, snapshot.digest, device_leaves(sent)))
            child.stdin.write(f"{version} {snapshot.digest}\n".encode())
            rows.append(row | json.loads(await child.stdout.readline()))
    finally:
        child.stdin.close()
        await child.wait()
        await server.stop(None)
    warm = rows[1:]  # the first round compiles
    medians = {name: statistics.median(row[name] for row in warm) for name in warm[0]}
    ratios = {
        "in_process_over_copy": statistics.median(row["in_process_s"] / row["copy_s"] for row in warm),
        "grpc_ready_over_copy": statistics.median(row["grpc_ready_s"] / row["copy_there_s"] for row in warm),
        "transfer_ready_over_copy": statistics.median(row["transfer_ready_s"] / row["copy_there_s"] for row in warm),
    }
    print(
        json.dumps(
            {
                "bytes": snapshot.nbytes,
                "rounds": len(warm),
                **{name: round(value, 4) for name, value in medians.items()},
                **{name: round(value, 2) for name, value in ratios.items()},
                "load": [round(value, 1) for value in os.getloadavg()],
                "cores": os.cpu_count(),
                "jax": jax.__version__,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sampler", help=argparse.SUPPRESS)
    given = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2)
    asyncio.run(sampler(sizes(given), given.sampler) if given.sampler else trainer(given, sizes(given)))
