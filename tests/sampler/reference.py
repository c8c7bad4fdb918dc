"""What the sampler must agree with: the trainer's forward, teacher-forced over prompt and completion."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import sharding
from jaxrl_llm.config import ModelConfig
from jaxrl_llm.losses.logprobs import token_logprobs
from jaxrl_llm.models.transformer import forward, head_weight, init_params
from jaxrl_llm.sampler.engine import PolicyEngine
from jaxrl_llm.sampler.scheduler import Scheduler
from jaxrl_llm.types import SampleRequest

CONFIG = ModelConfig(
    layers=2, d_model=32, heads=4, kv_heads=2, head_dim=8, d_ff=48, vocab_size=19, max_context=16, tie_embeddings=False
)
TIED = CONFIG.model_copy(update={"tie_embeddings": True})
EOS, PROMPT, NEW = 1, 6, 8
LENGTH = PROMPT + NEW


def sharpened(config, seed):
    """Random weights with a head large enough that the distributions are far from flat."""
    params = init_params(config, seed)
    name, scale = ("embed", 2.5) if config.tie_embeddings else ("head", 6.0)
    return params | {name: params[name] * scale}


def make_engine(config=CONFIG, *, slots=4, decode_steps=3, devices=None, axes=None, **changes):
    devices = jax.devices()[:1] if devices is None else devices
    mesh = sharding.make_mesh(axes or {"data": 1, "tensor": 1}, devices)
    settings = {"max_prompt_tokens": PROMPT, "max_new_tokens": NEW, "eos_id": EOS} | changes
    return PolicyEngine(config, mesh=mesh, slots=slots, decode_steps=decode_steps, **settings)


def run(scheduler: Scheduler, requests) -> list:
    """Completions in the order of the requests."""
    ids = scheduler.submit(requests)
    done = dict(scheduler.drain())
    assert sorted(done) == sorted(ids)
    return [done[i] for i in ids]


def request(prompt, *, new=NEW, temperature=1.0, seed=0, stream=0, sibling=0):
    return SampleRequest(np.asarray(prompt, np.int32), new, temperature, seed, stream, sibling)


def requests(count, *, seed=0, temperatures=(0.5, 1.0, 2.0), siblings=2, vocab=19):
    """Groups of siblings with prompts of every length, temperatures in turn."""
    rng = np.random.default_rng(seed)
    made = []
    for stream in range(-(-count // siblings)):
        prompt = rng.integers(0, vocab, 1 + stream % PROMPT)
        for sibling in range(siblings):
            temperature = temperatures[stream % len(temperatures)]
            new = int(rng.integers(1, NEW + 1))
            made.append(request(prompt, new=new, temperature=temperature, stream=stream, sibling=sibling, seed=seed))
    return made[:count]


class Trainer:
    """Teacher-forced log-probabilities of one config, compiled once."""

    def __init__(self, config):
        def logprobs(params, tokens_BT, lengths_B, temperature_B):
            positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), tokens_BT.shape)
            segments = (positions < lengths_B[:, None]).astype(jnp.int32)
            hidden = forward(config, params, tokens_BT, positions, segments)

            def row(hidden_TD, tokens_T, temperature):
                targets = jnp.concatenate([tokens_T[1:], tokens_T[:1]])
                logp, _ = token_logprobs(hidden_TD, head_weight(params), targets, temperature=temperature, chunk=LENGTH)
                return logp

            return jax.lax.map(lambda xs: row(*xs), (hidden, tokens_BT, temperature_B))

        self._logprobs = jax.jit(logprobs)

    def __call__(self, params, asked, completions, rows=32):
        """For each request the log-probabilities of its completion's tokens."""
        tokens = np.zeros((rows, LENGTH), np.int32)
        lengths, temperatures = np.zeros(rows, np.int32), np.ones(rows, np.float32)
        for i, (r, c) in enumerate(zip(asked, completions, strict=True)):
            row = np.concatenate([r.tokens_T, c.tokens_T])
            tokens[i, : len(row)], lengths[i] = row, len(row)
            temperatures[i] = r.temperature or 1.0
        logp = np.asarray(self._logprobs(params, tokens, lengths, temperatures))
        return [
            logp[i, len(r.tokens_T) - 1 : len(r.tokens_T) - 1 + len(c.tokens_T)]
            for i, (r, c) in enumerate(zip(asked, completions, strict=True))
        ]
