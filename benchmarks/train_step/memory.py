"""Peak temporary memory and compile time of the training step of SmolLM2's shape, from abstract shapes: nothing runs.

python benchmarks/train_step/memory.py --rows 8 --microbatches 8 --remat full
"""

import argparse
import json
import os
import time

import jax

from jaxrl_llm.aot import TPU_ENVIRONMENT, topology
from jaxrl_llm.config import ModelConfig, OptimizerConfig
from jaxrl_llm.losses.algorithms import bind
from jaxrl_llm.rollout.rows import RowShape, pack
from jaxrl_llm.sharding import make_mesh
from jaxrl_llm.train.algorithm import Algorithm
from jaxrl_llm.train.optimizer import make_optimizer
from jaxrl_llm.train.state import abstract_state
from jaxrl_llm.train.step import make_train_step


def measured(
    *,
    microbatches: int,
    rows: int,
    length: int = 256,
    head_chunk: int | None = None,
    vocab: int = 49152,
    layers: int = 30,
    remat: str = "full",
    gradient_dtype: str = "float32",
    compute_dtype: str = "float32",
    devices: str | None = None,
) -> dict[str, float]:
    """MiB of temporaries and of arguments on one device (of the topology `devices`), and seconds of compilation."""
    where = topology(devices) if devices else None
    model = ModelConfig(
        layers=layers,
        d_model=576,
        heads=9,
        kv_heads=3,
        head_dim=64,
        d_ff=1536,
        vocab_size=vocab,
        max_context=2048,
        compute_dtype=compute_dtype,
    )
    mesh = make_mesh({"data": 1}, (where.devices if where else jax.devices())[:1])
    optimizer = make_optimizer(OptimizerConfig(), total_steps=100)
    step = make_train_step(
        model,
        optimizer,
        Algorithm(bind("cispo", ratio_cap=5.0), token_level=True),
        mesh=mesh,
        temperature=1.0,
        head_chunk=head_chunk,
        remat=remat,
        gradient_dtype=gradient_dtype,
    )
    lowered = step.lower(abstract_state(model, optimizer, mesh=mesh), pack([], RowShape(microbatches, rows, length)))
    start = time.monotonic()
    compiled = lowered.compile(where.compiler_options if where else None)
    seconds = time.monotonic() - start
    memory = compiled.memory_analysis()
    return {
        "temporary_mib": memory.temp_size_in_bytes / 2**20,
        "arguments_mib": memory.argument_size_in_bytes / 2**20,
        "compile_s": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"microbatches": 8, "rows": 8, "length": 256, "head-chunk": None, "vocab": 49152}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--remat", default="full")
    parser.add_argument("--gradient-dtype", default="float32")
    parser.add_argument("--compute-dtype", default="float32")
    parser.add_argument("--devices", metavar="TOPOLOGY", help="compile for v5e:2x2 or h100:1, say; see `jaxrl aot`")
    os.environ.update(TPU_ENVIRONMENT)
    options = vars(parser.parse_args())
    print(json.dumps(options | {name: round(x, 1) for name, x in measured(**options).items()}))


if __name__ == "__main__":
    main()
