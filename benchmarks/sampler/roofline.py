"""What this machine could do at best with a model's decode step: its matrix products alone, and its bytes alone."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.config import ModelConfig
from jaxrl_llm.models.kv_cache import Cache
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


def chained_seconds(model: ModelConfig, loaded: Params, cache: Cache, rows: int) -> float:
    """The products of one decode step in the order in which they wait for one another, attention's two over the cache
    among them: no norms, rotations, softmax, activations, writes or sampling. What joins them are the sums of the
    residual stream, and of q, k and v, which stand where the attention's query does."""
    D, H, K, C = model.d_model, model.heads, model.kv_heads, model.head_dim

    def products(params, cache, x_D):
        for layer, kept in zip(params["layers"], cache, strict=True):
            q, k, v = (x_D @ layer[name].reshape(D, -1) for name in ("q", "k", "v"))
            query = q.reshape(rows, K, H // K, C) + (k + v).reshape(rows, K, 1, C)
            attended = jnp.einsum("bkrn,bknc->bkrc", jnp.einsum("bkrc,bkcn->bkrn", query, kept.k), kept.v)
            x_D = x_D + attended.reshape(rows, -1) @ layer["o"].reshape(-1, D)
            x_D = x_D + (x_D @ layer["gate"] + x_D @ layer["up"]) @ layer["down"]
        return jnp.einsum("nd,vd->nv", x_D, params.get("head", params["embed"]))

    x_D = jnp.asarray(np.random.default_rng(0).normal(size=(rows, D)).astype(np.float32))
    run = jax.jit(products)
    return best_seconds(lambda: run(loaded, cache, x_D))


def bytes_per_second() -> float:
    """Read bandwidth: the sum of 256 MiB of float32."""
    x = jnp.ones(2**26, jnp.float32)
    total = jax.jit(jnp.sum)
    return x.nbytes / best_seconds(lambda: total(x))
