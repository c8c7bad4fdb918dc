"""JetStream's stock Driver over PolicyEngine, as a program of its own: the Driver kills its process on any error.

Prints what the Driver streamed and what our scheduler makes of the same requests, as JSON.
"""

import asyncio
import json
import logging
from collections import deque

import jax
import numpy as np
from sampler_reference import CONFIG, EOS, make_params, request, run

from jaxrl_llm import sharding
from jaxrl_llm.sampler.engine import PolicyEngine
from jaxrl_llm.sampler.scheduler import Scheduler

# The one shim: JAX dropped the name that the Driver deletes prefixes with.
jax.tree_map = jax.tree.map

from jetstream.core import orchestrator  # noqa: E402
from jetstream.core.proto import jetstream_pb2  # noqa: E402
from jetstream.engine import engine_api, token_utils, tokenizer_api  # noqa: E402

logging.getLogger().setLevel(logging.ERROR)  # the Driver's module sets it to DEBUG, and prints to stdout
logging.getLogger().handlers.clear()

BOS, PROMPT, NEW = 2, 16, 8  # the Driver knows prompts of 16, 32, ... tokens only


class Tokenizer(tokenizer_api.Tokenizer):
    """Ids only; the padding id is none of them, because the Driver takes it for the end of a completion."""

    bos_id, eos_id, pad_id, stop_tokens = BOS, EOS, -1, {EOS}

    def encode(self, s, **kwargs):
        return token_utils.pad_tokens(np.array(json.loads(s)), BOS, self.pad_id, **kwargs)

    def decode(self, token_ids, **kwargs):
        return " ".join(map(str, token_ids))


class DriversEngine(PolicyEngine):
    """What this version of the Driver expects of an engine: no first token from prefill, one token a slot and step.

    A PolicyEngine reports the first token with the first dispatch and several tokens at once, so tokens wait here for
    the step that may tell of them. A step without a token tells the Driver that the slot has ended.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._waiting = [deque() for _ in range(self.slots)]
        self._told = np.zeros(self.slots, np.int32)

    def build_tokenizer(self, metadata):
        return Tokenizer()

    def prefill(self, **kwargs):
        prefix, _ = super().prefill(**kwargs)
        return prefix

    def insert(self, prefix, decode_state, slot):
        self._waiting[slot].clear()
        self._told[slot] = 0
        return super().insert(prefix, decode_state, slot)

    def generate(self, params, decode_state):
        decode_state, result = super().generate(params, decode_state)
        columns = result.columns()
        data = np.zeros((self.slots, 3), np.int32)
        for slot, waiting in enumerate(self._waiting):
            waiting.extend(columns.tokens[slot][columns.valid[slot]].tolist())
            if waiting:
                self._told[slot] += 1
                data[slot] = waiting.popleft(), True, self._told[slot]
        return decode_state, engine_api.ResultTokens(data, (0, 1), (1, 2), (2, 3), 1)


async def decode(server, prompt, new, session):
    if session:  # tokens with a session end the Driver's process: it takes a list for an array
        content = {"text_content": jetstream_pb2.DecodeRequest.TextContent(text=json.dumps(prompt))}
    else:
        content = {"token_content": jetstream_pb2.DecodeRequest.TokenContent(token_ids=prompt)}
    asked = jetstream_pb2.DecodeRequest(**content, max_tokens=new, session_cache=session)
    return [i async for answer in server.Decode(asked) for i in answer.stream_content.samples[0].token_ids]


async def decode_all(server, asked):
    return await asyncio.gather(*(decode(server, *each) for each in asked))


def main():
    config = CONFIG.model_copy(update={"max_context": PROMPT + NEW})
    mesh = sharding.make_mesh({"data": 1, "tensor": 1}, jax.devices()[:1])
    sizes = {"slots": 3, "decode_steps": 2, "max_prompt_tokens": PROMPT, "max_new_tokens": NEW, "eos_id": EOS}
    engine = DriversEngine(config, mesh=mesh, **sizes)
    params = make_params(config, 3)
    rng = np.random.default_rng(0)
    asked = []  # (prompt, budget, session): with a session the Driver leaves the begin-of-sequence token out
    for i in range(12):
        prompt = rng.integers(3, config.vocab_size, 1 + i).tolist()
        asked.append((prompt, 1 + i % NEW, "a session" if i % 2 else ""))

    loaded = engine.load_params(params)
    driver = orchestrator.Driver([engine], [engine], [loaded], [loaded], interleaved_mode=True)
    streamed = asyncio.run(decode_all(orchestrator.LLMOrchestrator(driver), asked))
    driver.stop()

    scheduler = Scheduler(PolicyEngine(config, mesh=mesh, **sizes), params)
    ours = run(
        scheduler,
        [request(prompt if session else [BOS, *prompt], new=new, temperature=0.0) for prompt, new, session in asked],
    )
    print(json.dumps({"driver": streamed, "ours": [completion.tokens_T.tolist() for completion in ours]}))


if __name__ == "__main__":
    main()
