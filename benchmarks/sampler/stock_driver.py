"""The same greedy requests through JetStream's stock Driver and through our Scheduler, in turn.

    python benchmarks/sampler/stock_driver.py --preset d256

The Driver runs with the adapter of its conformance test (tests/sampler/driver_program.py): it takes one token per slot
and step, neither log-probabilities nor siblings, and prefills every sibling's prompt.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tests" / "sampler")]

import jax
import numpy as np
from driver_program import BOS, DriversEngine, decode_all, orchestrator
from policy import model_of, random_params
from workload import arguments, work_of

from jaxrl_llm.sampler.engine import PolicyEngine
from jaxrl_llm.sampler.scheduler import Scheduler
from jaxrl_llm.sharding import make_mesh
from jaxrl_llm.types import SampleRequest, Sampling


def main() -> None:
    work = work_of(arguments(__doc__ or "").parse_args())
    model = model_of(work)
    sizes = {"slots": work.sequences, "max_prompt_tokens": work.prompt_len, "max_new_tokens": work.new, "eos_id": 0}
    mesh = make_mesh({"data": 1, "tensor": 1}, jax.devices()[:1])
    params = random_params(model)
    rng = np.random.default_rng(0)

    def prompts() -> list[list[int]]:
        drawn = rng.integers(3, model.vocab_size, (work.prompts, work.prompt_len - 1)).tolist()
        return [prompt for prompt in drawn for _ in range(work.group)]

    engine = DriversEngine(model, mesh=mesh, decode_steps=1, **sizes)
    loaded = engine.load_params(params)
    driver = orchestrator.Driver([engine], [engine], [loaded], [loaded], interleaved_mode=True)
    server = orchestrator.LLMOrchestrator(driver)
    scheduler = Scheduler(PolicyEngine(model, mesh=mesh, decode_steps=8, **sizes), params)

    def through_driver() -> int:
        streamed = asyncio.run(decode_all(server, [(prompt, work.new, "") for prompt in prompts()]))
        return sum(map(len, streamed))

    def through_scheduler() -> int:
        how = Sampling(work.new, temperature=0.0)
        arrays = {}  # siblings share an array, and so a prefill
        asked = [
            SampleRequest(arrays.setdefault(tuple(prompt), np.array([BOS, *prompt], np.int32)), how)
            for prompt in prompts()
        ]
        scheduler.submit(asked)
        return sum(len(completion.tokens_T) for _, completion in scheduler.drain())

    rates: dict[str, list[float]] = {"stock Driver": [], "Scheduler": []}
    for repeat in range(work.repeats + 1):
        for name, call in (("stock Driver", through_driver), ("Scheduler", through_scheduler)):
            start = time.perf_counter()
            made = call()
            if repeat:  # the first compiles
                rates[name].append(made / (time.perf_counter() - start))
    best = {name: max(values) for name, values in rates.items()}
    print(
        json.dumps({"preset": work.preset, **best, "ours / it": best["Scheduler"] / best["stock Driver"]}), flush=True
    )
    driver.stop()


if __name__ == "__main__":
    main()
