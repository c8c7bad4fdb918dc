"""One tiny model and one batch shape for every test of the step: compilation is what costs."""

import numpy as np

from jaxrl_llm.config import ModelConfig, OptimizerConfig
from jaxrl_llm.losses.algorithms import bind
from jaxrl_llm.train.algorithm import Algorithm
from jaxrl_llm.train.optimizer import make_optimizer
from jaxrl_llm.types import TrainBatch

MODEL = ModelConfig(layers=2, d_model=32, heads=4, kv_heads=2, head_dim=8, d_ff=48, vocab_size=20, max_context=16)
M, B, T = 8, 8, 16
TEMPERATURE = 0.7
HEAD_CHUNK = 64
CISPO = Algorithm(bind("cispo", ratio_cap=5.0), token_level=True)
OPTIMIZER_CONFIG = OptimizerConfig(lr=1e-3, warmup_steps=4, weight_decay=0.1)
ADAMW = make_optimizer(OPTIMIZER_CONFIG, total_steps=100)


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


def make_batch(docs, *, microbatches=2, per_row=1):
    """A TrainBatch [M, B, T]: `per_row` documents in a row, the rows dealt evenly over the first `microbatches`."""
    fields = {name: np.zeros((M, B, T), np.float32) for name in ("token_weights", "advantages", "behavior_logprobs")}
    fields |= {name: np.zeros((M, B, T), np.int32) for name in ("tokens", "targets", "positions", "segment_ids")}
    rows = [docs[start : start + per_row] for start in range(0, len(docs), per_row)]
    rows_each = -(-len(rows) // microbatches) if microbatches else 0
    for index, row in enumerate(rows if microbatches else ()):
        m, b = divmod(index, rows_each)
        cursor = 0
        for segment, doc in enumerate(row, 1):
            end = cursor + len(doc["tokens"])
            for name, values in doc.items():
                fields[name][m, b, cursor:end] = values
            fields["segment_ids"][m, b, cursor:end] = segment
            cursor = end
    return TrainBatch(**fields, microbatches=np.asarray(microbatches, np.int32))
