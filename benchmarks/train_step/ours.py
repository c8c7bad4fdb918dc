"""Times this project's training step, and the step's matrix products alone on the same machine.

python benchmarks/train_step/ours.py --preset d256 --share-prompts
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from policy import model_of, random_params
from workload import Work, arguments, report_step, timed, work_of

from jaxrl_llm.config import ModelConfig, OptimizerConfig
from jaxrl_llm.losses.algorithms import bind
from jaxrl_llm.rollout.rows import Document, RowShape, pack
from jaxrl_llm.sharding import make_mesh
from jaxrl_llm.train.algorithm import Algorithm
from jaxrl_llm.train.optimizer import make_optimizer
from jaxrl_llm.train.state import state_from_params
from jaxrl_llm.train.step import make_train_step
from jaxrl_llm.types import Reach


def documents(work: Work, vocab: int) -> list[Document]:
    rng = np.random.default_rng(0)
    made = []
    for _ in range(work.prompts):
        prompt = rng.integers(3, vocab, work.prompt_len).astype(np.int32)
        for _ in range(work.group):
            completion = rng.integers(3, vocab, work.new).astype(np.int32)
            weights = np.full(work.new, 1 / (work.sequences * work.new))
            advantages, logprobs = np.full(work.new, rng.standard_normal()), np.full(work.new, -np.log(vocab))
            made.append(Document(prompt, completion, weights, advantages, logprobs))
    return made


def products_seconds(model: ModelConfig, tokens: int, trained: int, repeats: int) -> float:
    """Forward and backward matrix products of one step, and nothing else: two more of each size going backward, the
    head's on the trained tokens alone. Attention's own products are left out."""
    D, F, C = model.d_model, model.d_ff, model.head_dim
    sizes = [(D, model.heads * C), (D, 2 * model.kv_heads * C), (model.heads * C, D), (D, F), (D, F), (F, D)]
    rng = np.random.default_rng(0)

    def drawn(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    def three(x, w, y):
        return jnp.sum(x @ w) + jnp.sum(x.T @ y) + jnp.sum(y @ w.T)

    @jax.jit
    def products(layer, head):
        total = jnp.float32(0)
        for x, w, y in layer:
            total += three(x, w, y)
        return total, three(*head)

    layer = [(drawn(tokens, m), drawn(m, n), drawn(tokens, n)) for m, n in sizes]
    nothing = [(drawn(1, m), drawn(m, n), drawn(1, n)) for m, n in sizes]
    rows = min(trained, 512)
    head = (drawn(rows, D), drawn(D, model.vocab_size), drawn(rows, model.vocab_size))
    tiny = (drawn(1, D), drawn(D, 1), drawn(1, 1))
    layer_s = min(timed(lambda: jax.block_until_ready(products(layer, tiny)), repeats))
    head_s = min(timed(lambda: jax.block_until_ready(products(nothing, head)), repeats))
    return model.layers * layer_s + trained / rows * head_s


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--share-prompts", action="store_true")
    parser.add_argument("--head-chunk", type=int, default=256)
    parser.add_argument("--unroll", type=int, default=1)
    parser.add_argument("--microbatch-rows", type=int, help="all rows by default")
    options = parser.parse_args()
    work = work_of(options)
    model = model_of(work)
    length = work.prompt_len - 1 + (work.group if options.share_prompts else 1) * work.new
    rows = work.prompts if options.share_prompts else work.sequences
    per_microbatch = options.microbatch_rows or rows
    share = options.share_prompts
    reach = Reach(work.new, work.prompt_len - 1) if share else Reach(work.prompt_len + work.new - 1)
    shape = RowShape(-(-rows // per_microbatch), per_microbatch, length, share_prompts=share, reach=reach)
    batch = pack(documents(work, model.vocab_size), shape)
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    optimizer = make_optimizer(OptimizerConfig(lr=1e-6, warmup_steps=0, weight_decay=0.0), total_steps=10**6)
    step = make_train_step(
        model,
        optimizer,
        Algorithm(bind("cispo", ratio_cap=5.0), token_level=True),
        mesh=mesh,
        temperature=1.0,
        head_chunk=options.head_chunk,
        remat="none",
        unroll=options.unroll,
        share_prompts=share,
        reach=reach,
    )
    state = state_from_params(model, optimizer, mesh=mesh, params=random_params(model))
    step = step.compiled(state, batch)

    def run() -> None:
        nonlocal state
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics["loss"])

    step_s = timed(run, work.repeats)
    tokens = int(np.count_nonzero(batch.segment_ids))
    products_s = products_seconds(model, tokens, work.sequences * work.new, work.repeats)
    report_step(
        "jaxrl_llm, shared prompts" if options.share_prompts else "jaxrl_llm",
        work,
        step_s,
        tokens_computed=tokens,
        products_ms=1e3 * products_s,
        share_of_limit=products_s / min(step_s),
        temporary_mb=step.jitted.memory_analysis().temp_size_in_bytes / 2**20,
    )


if __name__ == "__main__":
    main()
