"""Times this project's sampler: rollouts of groups, prefill alone, and the share of the machine's limit it reaches.

python benchmarks/sampler/ours.py --preset d256 --slots 64
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import numpy as np
from policy import model_of, random_params
from roofline import cache_read, chained, decode, products, race
from workload import arguments, report, timed, work_of

from jaxrl_llm.sampler.engine import PolicyEngine
from jaxrl_llm.sampler.scheduler import Scheduler
from jaxrl_llm.sharding import make_mesh
from jaxrl_llm.types import SampleRequest, Sampling


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--decode-steps", type=int, default=8)
    options = parser.parse_args()
    work = work_of(options)
    model = model_of(work)
    engine = PolicyEngine(
        model,
        mesh=make_mesh({"data": 1, "tensor": 1}, jax.devices()[:1]),
        slots=options.slots,
        decode_steps=options.decode_steps,
        max_prompt_tokens=work.prompt_len,
        max_new_tokens=work.new,
        eos_id=0,
    )
    scheduler = Scheduler(engine, random_params(model))
    rng = np.random.default_rng(0)
    stream = iter(range(10**9))

    def run(new: int) -> int:
        how = Sampling(new)
        prompts = rng.integers(3, model.vocab_size, (work.prompts, work.prompt_len)).astype(np.int32)
        asked = [
            SampleRequest(prompt, how, stream=next(stream), sibling=s) for prompt in prompts for s in range(work.group)
        ]
        scheduler.submit(asked)
        return sum(len(completion.tokens_T) for _, completion in scheduler.drain())

    def run_mixed() -> tuple[int, int]:
        """Four rounds of requests of random lengths: (prompt tokens of distinct prompts, tokens made)."""
        asked = []
        for _ in range(4 * work.prompts):
            prompt = rng.integers(3, model.vocab_size, rng.integers(1, work.prompt_len + 1)).astype(np.int32)
            how = Sampling(int(rng.integers(1, work.new + 1)))
            asked += [SampleRequest(prompt, how, stream=next(stream), sibling=s) for s in range(work.group)]
        scheduler.submit(asked)
        made = sum(len(completion.tokens_T) for _, completion in scheduler.drain())
        return sum(len(r.tokens_T) for r in asked if r.sibling == 0), made

    rollout_s = timed(lambda: run(work.new), work.repeats)
    before = scheduler.statistics
    made = run(work.new)
    after = scheduler.statistics
    prefill_s = timed(lambda: run(1), work.repeats)
    step_s = (min(rollout_s) - min(prefill_s)) / ((after.slot_steps - before.slot_steps) / options.slots)
    gap, busy = after.gap_s - before.gap_s, after.busy_s - before.busy_s
    run_mixed()
    start, before = time.perf_counter(), scheduler.statistics
    mixed_prompts, mixed_made = run_mixed()
    mixed_s, after = time.perf_counter() - start, scheduler.statistics
    mixed_steps = after.slot_steps - before.slot_steps
    loaded = engine.load_params(random_params(model))
    cache, steps = engine.init_decode_state().cache, options.decode_steps
    prompts = list(rng.integers(3, model.vocab_size, (work.prompts, work.prompt_len)).astype(np.int32))
    calls = {
        "decode": decode(engine, loaded, prompts),
        "products": products(model, loaded, options.slots),
        "cache": cache_read(cache),
        "chained": chained(model, loaded, cache, options.slots, steps),
    }
    raced = {name: 1e3 * s / (steps if name in ("decode", "chained") else 1) for name, s in race(calls).items()}
    report(
        "jaxrl_llm",
        work,
        rollout_s,
        prefill_s,
        slots=options.slots,
        tokens_made=made,
        step_ms=1e3 * step_s,
        **{f"{name}_ms": ms for name, ms in raced.items()},
        share_of_roofline=(raced["products"] + raced["cache"]) / raced["decode"],
        share_of_products=raced["products"] / raced["decode"],
        share_of_chained=raced["chained"] / raced["decode"],
        host_share=gap / (gap + busy),
        prefill_tok_s=work.prompts * work.prompt_len / min(prefill_s),
        mixed_tok_s=(mixed_prompts + mixed_made) / mixed_s,
        mixed_occupancy=(after.decoded_tokens - before.decoded_tokens) / mixed_steps,
    )


if __name__ == "__main__":
    main()
