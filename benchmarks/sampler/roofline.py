"""What this machine could do at best with a model's decode step: its matrix products alone, and its bytes alone."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.config import ModelConfig
from jaxrl_llm.types import Params


def best_seconds(call: Callable[[], object], repeats: int = 7) -> float:
    jax.block_until_ready(call())
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        best = min(best, time.perf_counter() - start)
    return best


def products_seconds(model: ModelConfig, loaded: Params, rows: int) -> float:
    """Every matrix product of one decode step of `rows` slots, over the engine's own weights, and nothing else."""
    D, F = model.d_model, model.d_ff

    def products(params, x_D, x_F, x_HC):
        total = jnp.float32(0)
        for layer in params["layers"]:
            for name in ("q", "k", "v", "gate", "up"):
                total += jnp.sum(x_D @ layer[name].reshape(D, -1))
            total += jnp.sum(x_HC @ layer["o"].reshape(-1, D)) + jnp.sum(x_F @ layer["down"])
        head = params.get("head", params["embed"])
        return total + jnp.sum(jnp.einsum("nd,vd->nv", x_D, head))

    rng = np.random.default_rng(0)
    inputs = [
        jnp.asarray(rng.normal(size=(rows, width)).astype(np.float32)) for width in (D, F, model.heads * model.head_dim)
    ]
    run = jax.jit(products)
    return best_seconds(lambda: run(loaded, *inputs))


def bytes_per_second() -> float:
    """Read bandwidth: the sum of 256 MiB of float32."""
    x = jnp.ones(2**26, jnp.float32)
    total = jax.jit(jnp.sum)
    return x.nbytes / best_seconds(lambda: total(x))
