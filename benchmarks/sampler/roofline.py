"""What this machine could do at best with a model's decode step, and the step itself, in turn in the same minute."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrl_llm.config import ModelConfig
from jaxrl_llm.models.kv_cache import Cache
from jaxrl_llm.sampler.engine import PolicyEngine
from jaxrl_llm.types import Params, SampleRequest, Sampling


def race(calls: Mapping[str, Callable[[], object]], *, seconds: float = 20.0) -> dict[str, float]:
    """Median seconds of each call: all in turn, every second round backwards, at least 10 rounds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready(call())
    begun, rounds = time.perf_counter(), 0
    while rounds < 10 or time.perf_counter() - begun < seconds:
        for name, call in list(calls.items())[:: 1 if rounds % 2 else -1]:
            start = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(time.perf_counter() - start)
        rounds += 1
    return {name: median(each) for name, each in times.items()}


def decode(engine: PolicyEngine, loaded: Params, prompts: Sequence[np.ndarray]) -> Callable[[], object]:
    """One dispatch of the engine, all of whose slots hold one of the prompts and never end."""
    version, state = engine.device_version(0), engine.init_decode_state()
    requests = [SampleRequest(prompt, Sampling(engine.max_new_tokens), stream=n) for n, prompt in enumerate(prompts)]
    for slot in range(engine.slots):
        request = requests[slot % len(requests)]
        prefix = engine.prefill_many(loaded, [request.tokens_T], version)
        state = engine.insert_many(prefix, state, [(slot, 0, replace(request, sibling=slot))])
    endless = {"limits": jnp.full_like(state.slots.limits, 2**30), "stop_ids": jnp.full_like(state.slots.stop_ids, -1)}
    state = replace(state, slots=replace(state.slots, **endless))

    def dispatch():
        nonlocal state
        state, results = engine.generate(loaded, state)
        return state.slots.tokens, results

    return dispatch


def products(model: ModelConfig, loaded: Params, rows: int) -> Callable[[], object]:
    """Every matrix product of one decode step with weights, over the engine's own; none waits for another."""
    D, F = model.d_model, model.d_ff

    def of_all(params, x_D, x_F, x_HC):
        total = jnp.float32(0)
        for layer in params["layers"]:
            for name in ("q", "k", "v", "gate", "up"):
                total += jnp.sum(x_D @ layer[name].reshape(D, -1))
            total += jnp.sum(x_HC @ layer["o"].reshape(-1, D)) + jnp.sum(x_F @ layer["down"])
        return total + jnp.sum(jnp.einsum("nd,vd->nv", x_D, params.get("head", params["embed"])))

    rng = np.random.default_rng(0)
    widths = (D, F, model.heads * model.head_dim)
    inputs = [jnp.asarray(rng.normal(size=(rows, width)).astype(np.float32)) for width in widths]
    run = jax.jit(of_all)
    return lambda: run(loaded, *inputs)


def cache_read(cache: Cache) -> Callable[[], object]:
    """Keys and values of every slot read once, as attention must: their sums."""
    run = jax.jit(lambda cache: [jnp.sum(leaf) for leaf in jax.tree.leaves(cache)])
    return lambda: run(cache)


def chained(model: ModelConfig, loaded: Params, cache: Cache, rows: int, steps: int) -> Callable[[], object]:
    """The products of `steps` decode steps in the order in which they wait for one another, attention's two over the
    cache among them: no norms, rotations, softmax, activations, writes or sampling. What joins them are the sums of the
    residual stream, and of q, k and v, which stand where the attention's query does."""
    D, H, K, C = model.d_model, model.heads, model.kv_heads, model.head_dim

    def one_step(params, cache, x_D):
        for layer, kept in zip(params["layers"], cache, strict=True):
            q, k, v = (x_D @ layer[name].reshape(D, -1) for name in ("q", "k", "v"))
            query = q.reshape(rows, K, H // K, C) + (k + v).reshape(rows, K, 1, C)
            attended = jnp.einsum("bkrn,bknc->bkrc", jnp.einsum("bkrc,bkcn->bkrn", query, kept.k), kept.v)
            x_D = x_D + attended.reshape(rows, -1) @ layer["o"].reshape(-1, D)
            x_D = x_D + (x_D @ layer["gate"] + x_D @ layer["up"]) @ layer["down"]
        logits = jnp.einsum("nd,vd->nv", x_D, params.get("head", params["embed"]))
        return jnp.tanh(x_D) + logits[:, :1]  # bounded, however many steps

    x_D = jnp.asarray(np.random.default_rng(0).normal(size=(rows, D)).astype(np.float32))
    run = jax.jit(lambda params, cache, x: lax.fori_loop(0, steps, lambda _, x: one_step(params, cache, x), x))
    return lambda: run(loaded, cache, x_D)
