"""One tiny model and one batch shape for every test of the step: compilation is what costs."""

import functools

import numpy as np
import optax

from jaxrl_llm.config import ModelConfig, OptimizerConfig
from jaxrl_llm.losses.objectives import cispo
from jaxrl_llm.train.optimizer import make_optimizer
from jaxrl_llm.types import TrainBatch

MODEL = ModelConfig(layers=2, d_model=32, heads=4, kv_heads=2, head_dim=8, d_ff=48, vocab_size=20, max_context=16)
T = 16
OBJECTIVE = functools.partial(cispo, ratio_cap=5.0)
ADAMW = make_optimizer(OptimizerConfig(lr=1e-3, warmup_steps=4, weight_decay=0.1), total_steps=100)
GRADIENT = optax.sgd(1.0)
"""With it, parameters before minus parameters after is the gradient."""


def documents(seed, count=16):
    """`count` documents of 3..5 predicted tokens; the last one to three are trained."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        n = int(rng.integers(3, 6))
        trained = np.arange(n) >= n - int(rng.integers(1, 4))
        made.append(
            {
                "tokens": rng.integers(0, MODEL.vocab_size, n),
                "targets": rng.integers(0, MODEL.vocab_size, n),
                "positions": np.arange(n),
                "token_weights": np.where(trained, rng.uniform(0.5, 1.5, n) / (2 * count), 0.0),
                "advantages": rng.normal(size=n),
                "behavior_logprobs": -3.0 + 0.3 * rng.normal(size=n),
            }
        )
    return made


def pack(docs, *, per_row, shape, microbatches=None):
    """A TrainBatch [M, B, T] with `per_row` documents in a row, filled in order."""
    M, B = shape
    fields = {name: np.zeros((M * B, T), np.float32) for name in ("token_weights", "advantages", "behavior_logprobs")}
    fields |= {name: np.zeros((M * B, T), np.int32) for name in ("tokens", "targets", "positions", "segment_ids")}
    for start in range(0, len(docs), per_row):
        row, cursor = start // per_row, 0
        for segment, doc in enumerate(docs[start : start + per_row], 1):
            end = cursor + len(doc["tokens"])
            for name, values in doc.items():
                fields[name][row, cursor:end] = values
            fields["segment_ids"][row, cursor:end] = segment
            cursor = end
    microbatches = M if microbatches is None else microbatches
    return TrainBatch(
        **{name: x.reshape(M, B, T) for name, x in fields.items()}, microbatches=np.asarray(microbatches, np.int32)
    )
