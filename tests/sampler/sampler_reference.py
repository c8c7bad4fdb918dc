"""What the sampler must agree with: the trainer's forward, teacher-forced over prompt and completion."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import sharding
from jaxrl_llm.config import ModelConfig
from jaxrl_llm.losses.logprobs import project_f32, token_logprobs
from jaxrl_llm.models.kv_cache import empty_cache
from jaxrl_llm.models.transformer import abstract_params, decode, forward, head_weight
from jaxrl_llm.sampler.engine import PolicyEngine
from jaxrl_llm.sampler.scheduler import Scheduler
from jaxrl_llm.types import SampleRequest, Sampling

# 20 tokens divide over two devices and are no multiple of the sampling block's width (8).
CONFIG = ModelConfig(
    layers=2, d_model=32, heads=4, kv_heads=2, head_dim=8, d_ff=48, vocab_size=20, max_context=16, tie_embeddings=False
)
TIED = CONFIG.model_copy(update={"tie_embeddings": True})
EOS, PROMPT, NEW = 1, 6, 8
LENGTH = PROMPT + NEW
# Room for thinking, and for prompts of two buckets and of more than one chunk.
LONG = CONFIG.model_copy(update={"max_context": 64})
LONG_PROMPT, LONG_NEW = 22, 40
PHRASE, MARK = (7, 8, 9), (4, 5)


def make_params(config, seed):
    """Random weights whose distributions are far from flat and far from certain (drawn by numpy: nothing compiles)."""
    rng = np.random.default_rng(seed)
    scales = {"embed": 0.2, "head": 0.6}

    def leaf(path, abstract):
        name = path[-1].key
        noise = rng.standard_normal(abstract.shape, np.float32)
        return 1 + 0.1 * noise if "norm" in name else scales.get(name, 0.3) * noise

    return jax.tree.map(jnp.asarray, jax.tree_util.tree_map_with_path(leaf, abstract_params(config)))


def make_engine(config=CONFIG, *, slots=4, decode_steps=3, axes=None, **changes):
    axes = axes or {"data": 1, "tensor": 1}
    mesh = sharding.make_mesh(axes, jax.devices()[: int(np.prod(list(axes.values())))])
    settings = {"max_prompt_tokens": PROMPT, "max_new_tokens": NEW, "eos_id": EOS} | changes
    return PolicyEngine(config, mesh=mesh, slots=slots, decode_steps=decode_steps, **settings)


def stacked_keys(cache):
    """[L S K N C] whether the cache is a stack or a tuple of layers."""
    keys = np.stack([layer.k for layer in cache]) if isinstance(cache, tuple) else np.asarray(cache.k)
    return keys.swapaxes(-1, -2)


def request(prompt, *, new=NEW, temperature=1.0, seed=0, stream=0, sibling=0, **how):
    return SampleRequest(np.asarray(prompt, np.int32), Sampling(new, temperature, **how), seed, stream, sibling)


def make_requests(count, *, seed=0, temperatures=(0.5, 1.0, 2.0), siblings=2):
    """Groups of siblings with prompts of every length, temperatures in turn, some cut short."""
    rng = np.random.default_rng(seed)
    made = []
    for stream in range(-(-count // siblings)):
        prompt = rng.integers(0, CONFIG.vocab_size, 1 + stream % PROMPT).astype(np.int32)
        for sibling in range(siblings):
            new = 1 + stream % NEW if sibling else NEW
            temperature = temperatures[stream % len(temperatures)]
            made.append(request(prompt, new=new, temperature=temperature, stream=stream, sibling=sibling, seed=seed))
    return made[:count]


def run(scheduler: Scheduler, asked) -> list:
    """Completions in the order of the requests."""
    ids = scheduler.submit(asked)
    done = scheduler.drain()
    assert sorted(i for i, _ in done) == sorted(ids)
    return [dict(done)[i] for i in ids]


def assert_same(one, two, atol=1e-5):
    """Equal tokens and finishes, log-probabilities within float32 rounding."""
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a.tokens_T, b.tokens_T)
        np.testing.assert_allclose(a.logprobs_T, b.logprobs_T, atol=atol)
        assert a.finish == b.finish


class Trainer:
    """The trainer's view of one config: full forward, teacher-forced, compiled once for 32 rows."""

    ROWS = 32

    def __init__(self, config, length=LENGTH):
        self._length = length

        def view(params, tokens_BT, lengths_B, temperature_B):
            positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens_BT.shape)
            segments = (positions < lengths_B[:, None]).astype(jnp.int32)
            hidden = forward(config, params, tokens_BT, positions, segments)

            def row(xs):
                hidden_TD, tokens_T, temperature = xs
                head, targets = head_weight(params), jnp.concatenate([tokens_T[1:], tokens_T[:1]])
                cap = config.final_softcap
                logp, _ = token_logprobs(hidden_TD, head, targets, temperature=temperature, chunk=length, softcap=cap)
                return logp, jnp.argmax(project_f32(hidden_TD, head), axis=-1)

            return jax.lax.map(row, (hidden, tokens_BT, temperature_B))

        self._view = jax.jit(view)

    def __call__(self, params, asked, completions):
        """Per request: log-probabilities of its completion's tokens, and the greedy choice at each of them."""
        tokens, lengths = np.zeros((self.ROWS, self._length), np.int32), np.zeros(self.ROWS, np.int32)
        temperatures = np.ones(self.ROWS, np.float32)
        for i, (r, c) in enumerate(zip(asked, completions, strict=True)):
            row = np.concatenate([r.tokens_T, c.tokens_T])
            tokens[i, : len(row)], lengths[i], temperatures[i] = row, len(row), r.sampling.temperature or 1.0
        logprobs, greedy = map(np.asarray, self._view(params, tokens, lengths, temperatures))
        views = []
        for i, (r, c) in enumerate(zip(asked, completions, strict=True)):
            at = slice(len(r.tokens_T) - 1, len(r.tokens_T) - 1 + len(c.tokens_T))
            views.append((logprobs[i, at], greedy[i, at]))
        return views


class MixedReference:
    """Log-probabilities of one sequence whose weights changed on the way: old positions keep their old keys."""

    def __init__(self, config):
        self._config = config
        self._step = jax.jit(lambda params, token, at, cache: self._logits(params, token, at, cache))

    def _logits(self, params, token, at, cache):
        hidden, cache = decode(self._config, params, token, at, cache)
        return project_f32(hidden, head_weight(params))[0], cache

    def __call__(self, params_of, asked, completion):
        config, prompt = self._config, asked.tokens_T
        cache = empty_cache(
            layers=config.layers,
            slots=1,
            length=LENGTH,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=jnp.float32,
        )
        logprobs = []
        # The first token's version prefilled the prompt; every later one decoded the token before it.
        for i in range(len(prompt) + len(completion.tokens_T) - 1):
            made = i - len(prompt) + 1
            version = completion.versions_T[max(made, 0)]
            token = prompt[i] if i < len(prompt) else completion.tokens_T[i - len(prompt)]
            at = np.array([i], np.int32)
            logits, cache = self._step(params_of[version], np.array([token], np.int32), at, cache)
            if made >= 0:
                logprobs.append(
                    jax.nn.log_softmax(logits / (asked.sampling.temperature or 1.0))[completion.tokens_T[made]]
                )
        return np.array(logprobs)
