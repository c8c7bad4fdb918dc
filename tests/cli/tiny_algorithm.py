"""A configured algorithm on a policy of a few thousand weights: groups in, one step out, without a sampler."""

from dataclasses import replace

import jax
import numpy as np
import optax

from jaxrl_llm.cli.algorithm import bind_algorithm, bind_selection, check_algorithm
from jaxrl_llm.config import RunConfig, validate
from jaxrl_llm.models.transformer import abstract_params
from jaxrl_llm.rollout.batching import select
from jaxrl_llm.rollout.rows import RowShape, pack
from jaxrl_llm.sharding import make_mesh
from jaxrl_llm.train.algorithm import AdaptiveEntropy
from jaxrl_llm.train.state import abstract_state, state_from_params
from jaxrl_llm.train.step import make_train_step
from jaxrl_llm.types import Completion, Episode, EpisodeGroup, PromptTask, Reward

VOCAB, PROMPT, LONGEST = 12, 2, 4
SIZES = {
    "model": {"layers": 1, "d_model": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "d_ff": 24, "vocab_size": VOCAB},
    "rollout": {"prompts_per_step": 4, "group_size": 4, "max_prompt_tokens": PROMPT, "max_new_tokens": LONGEST},
    "train": {"row_length": 16, "microbatch_rows": 4, "head_chunk": 64},
}


def configured(algorithm: dict, **rollout) -> RunConfig:
    tree = SIZES | {"rollout": SIZES["rollout"] | rollout, "algorithm": algorithm}
    config = validate(tree, "test")
    check_algorithm(config)
    return config


def weights(config: RunConfig, seed: int = 0):
    """Uneven weights, drawn in numpy, which has nothing to compile."""
    rng = np.random.default_rng(seed)

    def draw(path, x):
        noise = rng.normal(size=x.shape).astype(np.float32)
        return 1 + 0.1 * noise if "norm" in jax.tree_util.keystr(path) else 0.3 * noise

    return jax.tree_util.tree_map_with_path(draw, abstract_params(config.model))


def groups(config: RunConfig, seed: int = 0, rewards=None, prompt: int = PROMPT) -> list[EpisodeGroup]:
    """Groups of random completions of 1 to LONGEST tokens; rewards are 1 and -1 unless given as [P, G]."""
    rng, made = np.random.default_rng(seed), []
    shape = (config.rollout.prompts_per_step, config.rollout.group_size)
    rewards = rng.choice([-1.0, 1.0], size=shape) if rewards is None else np.asarray(rewards)
    for p in range(shape[0]):
        task = PromptTask(f"task{p}", rng.integers(0, VOCAB, prompt).astype(np.int32), "p", "a", "s", "exact")
        episodes = []
        for g in range(shape[1]):
            n = int(rng.integers(1, LONGEST + 1))
            tokens = rng.integers(0, VOCAB, n).astype(np.int32)
            logprobs = (-2.5 + 0.4 * rng.normal(size=n)).astype(np.float32)
            completion = Completion(
                tokens, logprobs, np.zeros(n, np.int32), np.zeros(n, bool), "length" if n == LONGEST else "stop"
            )
            reward = Reward(float(rewards[p, g]), {"correct": float(rewards[p, g] > 0)})
            episodes.append(Episode(completion, np.ones(n, bool), reward))
        made.append(EpisodeGroup(p, task, tuple(episodes)))
    return made


class Tiny:
    """The step of a configuration with plain gradient descent, whose updates are the gradient itself."""

    def __init__(self, config: RunConfig, *, rate: float, reference=None, axes=None, optimizer=None):
        self.config, self.optimizer = config, optimizer or optax.sgd(rate)
        shortest = 1 if config.train.share_prompts else PROMPT
        self.algorithm = bind_algorithm(config, num_segments=1 + config.train.row_length // shortest)
        if self.algorithm.critic is not None:
            critic = replace(self.algorithm.critic, optimizer=self.optimizer)
            self.algorithm = replace(self.algorithm, critic=critic)
        axes = axes or {}
        self.mesh = make_mesh(axes, jax.devices()[: int(np.prod(list(axes.values()), dtype=int))])
        step = make_train_step(
            config.model,
            self.optimizer,
            self.algorithm,
            mesh=self.mesh,
            temperature=config.rollout.temperature,
            head_chunk=config.train.head_chunk,
            remat="none",
            reference=reference,
        )
        lowered = step.jitted.lower(
            abstract_state(config.model, **self._beside()), pack([], self.shape), reference, None
        )
        # Many tests compile a step of their own and run it once or twice; the numbers are float32 all the same.
        compiled = lowered.compile(compiler_options={"xla_backend_optimization_level": "0"})
        self.step = replace(step, jitted=compiled)

    def _beside(self):
        return {
            "optimizer": self.optimizer,
            "mesh": self.mesh,
            "critic": self.optimizer if self.algorithm.critic is not None else None,
            "adapts_entropy": isinstance(self.algorithm.entropy, AdaptiveEntropy),
        }

    def state(self, params):
        return state_from_params(self.config.model, params=params, **self._beside())

    @property
    def shape(self) -> RowShape:
        """Room for every document in a row of its own."""
        rollout, train = self.config.rollout, self.config.train
        documents = rollout.prompts_per_step * rollout.group_size // self.algorithm.updates
        return RowShape(
            -(-documents // train.microbatch_rows),
            train.microbatch_rows,
            train.row_length,
            self.algorithm.updates,
            train.share_prompts,
        )

    def batch(self, groups):
        return pack(select(groups, bind_selection(self.config)).documents, self.shape)

    def __call__(self, state, groups):
        return self.step(state, self.batch(groups))


def host(tree):
    return jax.tree.map(np.asarray, tree)


def number(metric) -> float:
    """A metric as a plain number."""
    return float(metric.total / metric.weight) if hasattr(metric, "weight") else float(metric)
