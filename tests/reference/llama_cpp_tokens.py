"""Token ids of llama.cpp for the small tokenizers of tests/text/gguf_families.py, stored as digests.

See README.md in this folder. With .model files as arguments (those of mistral-common, say), SentencePiece models of
real size are compared as well; nothing of them is stored.
"""

import json
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp

TESTS = Path(__file__).parents[1]
sys.path.append(str(TESTS / "text"))

from gguf_families import (  # noqa: E402
    PRE_TOKENIZERS,
    byte_level_metadata,
    sentencepiece_metadata,
    sentencepiece_model,
)
from tokenizer_strings import digests, strings  # noqa: E402

from jaxrl_llm.text.gguf_tokenizer import GgufTokenizer  # noqa: E402
from jaxrl_llm.text.sentencepiece import SentencePieceTokenizer  # noqa: E402

OUT = TESTS / "data" / "llama_cpp_tokens.npz"
MODEL = TESTS / "data" / "llama_like.model"
WIDTH = 32


def write_model(path: Path, metadata: dict[str, Any]) -> None:
    """A model of one layer, all zeros, around the tokenizer: llama.cpp does not load a tokenizer alone."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    rows = len(metadata["tokenizer.ggml.tokens"])
    square, vector = np.zeros((WIDTH, WIDTH), np.float32), np.zeros(WIDTH, np.float32)
    writer.add_tensor("token_embd.weight", np.zeros((rows, WIDTH), np.float32))
    writer.add_tensor("output_norm.weight", vector)
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", vector)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", square)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tokenize(metadata: dict[str, Any], texts: Sequence[str]) -> list[list[int]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_model(path, metadata)
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = 256
        params.warmup = False
        server = xllamacpp.Server(params)  # on a free port of the loopback interface
        rows = []
        for text in texts:
            body = json.dumps({"content": text, "add_special": False, "parse_special": False}).encode()
            request = urllib.request.Request(f"{server.listening_address}/tokenize", body)
            request.add_header("Content-Type", "application/json")
            rows.append(json.load(urllib.request.urlopen(request))["tokens"])
        return rows


def compare(name: str, encode: Callable[[str], list[int]], metadata: dict[str, Any]) -> np.ndarray:
    texts = strings(2200)
    theirs = tokenize(metadata, texts)
    different = [(text, encode(text), ids) for text, ids in zip(texts, theirs, strict=True) if encode(text) != ids]
    for text, our_ids, their_ids in different[:5]:
        print(f"{text!r}\n  ours   {our_ids}\n  theirs {their_ids}")
    print(f"{name}: {len(texts)} strings, {len(different)} encoded differently", flush=True)
    return digests(theirs)


def main() -> None:
    stored = {}
    for pre in PRE_TOKENIZERS:
        metadata = byte_level_metadata(pre)
        stored[pre] = compare(pre, GgufTokenizer(metadata, source=pre).encode, metadata)
    # llama.cpp puts a space before the text after a word of its users, SentencePiece does not: so there are none.
    model = sentencepiece_model(user_defined_symbols=[])
    MODEL.write_bytes(model)  # kept, because another version of the library might train another
    stored["sentencepiece"] = compare(
        "sentencepiece", SentencePieceTokenizer(model).encode, sentencepiece_metadata(model)
    )
    for path in map(Path, sys.argv[1:]):
        model = path.read_bytes()
        compare(path.name, SentencePieceTokenizer(model).encode, sentencepiece_metadata(model))
    np.savez_compressed(OUT, **stored)
    print(f"wrote {OUT} ({OUT.stat().st_size} bytes)")


if __name__ == "__main__":
    main()
