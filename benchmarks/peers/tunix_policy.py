"""A random Llama of a preset inside Tunix's RLCluster ("vanilla" engine). Needs google-tunix.

The end and pad ids lie outside the vocabulary, so that every completion has its full length.
"""

import logging
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
logging.disable(logging.WARNING)

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from tunix.models.llama3 import model as llama
from tunix.rl import rl_cluster
from tunix.rl.rollout import base_rollout
from workload import PRESETS, Work


class Words:
    """One written integer is one token."""

    def __init__(self, vocab: int):
        self._vocab = vocab

    def encode(self, text, **_):
        return [int(word) for word in text.split()]

    def decode(self, ids, **_):
        return " ".join(str(int(i)) for i in ids)

    def bos_id(self):
        return 1

    def eos_id(self):
        return self._vocab + 7

    def pad_id(self):
        return self._vocab + 8


def cluster_of(work: Work) -> rl_cluster.RLCluster:
    shape = PRESETS[work.preset]
    config = llama.ModelConfig(
        num_layers=shape.layers,
        vocab_size=shape.vocab,
        embed_dim=shape.d_model,
        hidden_dim=shape.d_ff,
        num_heads=shape.heads,
        head_dim=shape.head_dim,
        num_kv_heads=shape.kv_heads,
        rope_theta=int(shape.rope_theta),
        norm_eps=1e-5,
        weight_tying=True,
    )
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with mesh:
        model = llama.Llama3(config, rngs=nnx.Rngs(0))
    leaves, tree = jax.tree.flatten(nnx.state(model, nnx.Param))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    drawn = [
        jnp.ones_like(x) if x.ndim == 1 else 0.02 * jax.random.normal(key, x.shape, jnp.float32)
        for x, key in zip(leaves, keys, strict=True)
    ]
    nnx.update(model, jax.tree.unflatten(tree, drawn))
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    return rl_cluster.RLCluster(
        actor=model,
        reference=None,
        tokenizer=Words(shape.vocab),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            rollout_engine="vanilla",
            offload_to_cpu=False,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adamw(1e-6, b1=0.9, b2=0.999, weight_decay=0.0),
                eval_every_n_steps=10**9,
                max_steps=10**6,
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=work.new,
                max_prompt_length=work.prompt_len,
                kv_cache_size=work.prompt_len + work.new,
                temperature=1.0,
                top_p=1.0,
                top_k=None,
            ),
        ),
    )
