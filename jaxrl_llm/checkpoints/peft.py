"""Adapters in PEFT's layout: adapter_config.json and adapter_model.safetensors, read and written.

It has `lora_A.weight` [r, inputs] and `lora_B.weight` [outputs, r] for every linear layer; the tree of models/lora.py
has A [inputs, r] and B [r, outputs], with heads on an axis of their own.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.checkpoints.folders import new_folder, read_object
from jaxrl_llm.checkpoints.hf_tensors import HfTensor, hf_tensors
from jaxrl_llm.checkpoints.hub import hub_snapshot, is_hub, repository
from jaxrl_llm.checkpoints.safetensors_file import FLOATS, StoredTensor, read_table, write_file
from jaxrl_llm.config import LoraConfig, ModelConfig
from jaxrl_llm.types import Params, UserError

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MODULES = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o",
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
}  # fmt: skip

# What says nothing about the function that the adapter computes: where it came from, and how it was trained.
_SILENT = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "megatron_core", "qalora_group_size",
}  # fmt: skip
_READ = {"peft_type", "r", "lora_alpha", "target_modules", "use_rslora", "bias", "init_lora_weights"}
# Ways to begin an adapter that leave the base as it is; the others also move the base's weights.
_HARMLESS_STARTS = (True, False, None, "gaussian", "orthogonal")


def adapter_folder(source: str) -> Path:
    """Where an adapter is: a local path, or the files of `hub:OWNER/NAME[@REVISION]`. Raises UserError as
    `hub_snapshot`."""
    return hub_snapshot(source, adapter=True) if is_hub(source) else Path(source)


def is_peft_folder(path: Path) -> bool:
    return (path / _CONFIG).is_file()


def read_peft_table(path: Path) -> dict[str, StoredTensor]:
    """An adapter's tensors by name. Raises UserError if there are none or the file is damaged."""
    if not (path / _WEIGHTS).is_file():
        raise UserError(f"{path} has no {_WEIGHTS}; only safetensors are read")
    return read_table(path / _WEIGHTS)


def read_peft_config(path: str | Path) -> dict[str, Any]:
    """The keys of LoraConfig that an adapter's folder decides: rank, alpha, targets, rslora. No weights are read.

    Raises UserError naming the file that is missing or the option that is not supported.
    """
    file = Path(path) / _CONFIG
    if not file.is_file():
        raise UserError(f"{path} has no {_CONFIG}; give a folder in PEFT's layout")
    told = read_object(file)

    def refuse(option: str, supported: str) -> NoReturn:
        raise UserError(f"{file}: {option} = {json.dumps(told.get(option))} is not supported; {supported}")

    if told.get("peft_type") != "LORA":
        refuse("peft_type", "'LORA' is")
    for option, value in told.items():  # use_dora, modules_to_save, rank_pattern, ... and what comes after them
        if option not in _READ | _SILENT and value:
            refuse(option, "leave it out when the adapter is made")
    if told.get("bias", "none") != "none":
        refuse("bias", "'none' is")
    if told.get("init_lora_weights", True) not in _HARMLESS_STARTS:
        refuse("init_lora_weights", "it changes the base's weights; convert the adapter with PEFT first")
    rank, alpha, modules, rslora = (told.get(key) for key in ("r", "lora_alpha", "target_modules", "use_rslora"))
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        refuse("r", "a positive integer is")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < math.inf:
        refuse("lora_alpha", "a positive number is")
    if not isinstance(modules, list) or not modules:
        refuse("target_modules", f"a list of {list(_MODULES)} is")
    if unknown := [module for module in modules if not isinstance(module, str) or module not in _MODULES]:
        raise UserError(f"{file}: target_modules has {unknown[0]!r}; known are {list(_MODULES)}")
    targets = tuple(ours for theirs, ours in _MODULES.items() if theirs in modules)
    return {"rank": rank, "alpha": float(alpha), "targets": targets, "rslora": bool(rslora)}


def read_peft(path: str | Path, model: ModelConfig) -> tuple[LoraConfig, Params]:
    """An adapter of this model: its settings, and the tree of models/lora.py as float32 numpy arrays.

    Raises UserError as `read_peft_config`, and naming the tensor that is missing, unexpected, of another shape (then
    the adapter is of another rank or base model), damaged or not finite.
    """
    path = Path(path)
    lora = LoraConfig(**read_peft_config(path))
    stored, parts = read_peft_table(path), list(_parts(model, lora))
    for _, _, _, name, shape in parts:
        if name not in stored:
            raise UserError(f"{path}: tensor {name!r} is missing")
        if stored[name].shape != shape:
            raise UserError(
                f"{path}: tensor {name!r} has shape {stored[name].shape}; r = {lora.rank} of {_CONFIG} and the base "
                f"model ask for {shape}, so the adapter is of another rank or of another model"
            )
        if stored[name].kind not in FLOATS:
            raise UserError(f"{path}: tensor {name!r} has dtype {stored[name].kind}; supported: {', '.join(FLOATS)}")
    if extra := sorted(stored.keys() - {name for *_, name, _ in parts}):
        raise UserError(
            f"{path}: tensor {extra[0]!r} (and {len(extra) - 1} more) is unexpected: target_modules does not name it, "
            f"or the base model of {model.layers} layers has no such projection"
        )
    tree: dict[str, dict[str, list[np.ndarray]]] = {}
    for target, part, tensor, name, _ in parts:
        layers = tree.setdefault(target, {}).setdefault(part, [])
        layers.append(_to_ours(tensor, part, stored[name].read().astype(np.float32)))
    return lora, {"lora": {target: {part: np.stack(x) for part, x in pair.items()} for target, pair in tree.items()}}


def write_peft(
    path: str | Path, model: ModelConfig, lora: LoraConfig, adapters: Params, *, base: str | None, dtype: Any = None
) -> None:
    """Writes an adapter's folder, which must not exist yet; it appears complete or not at all.

    `adapters` is the tree of models/lora.py, of numpy arrays; `dtype` (theirs by default) is the file's. `base` is
    what the folder calls its base model, for those who load both by one name: a folder or a name on the Hub.
    Raises UserError if it exists or cannot be written.
    """
    name, revision = repository(base) if base is not None and is_hub(base) else (base, None)
    told = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "revision": revision,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "use_rslora": lora.rslora,
        "bias": "none",
        "target_modules": [theirs for theirs, ours in _MODULES.items() if ours in lora.targets],
    }
    with new_folder(Path(path)) as unfinished:
        rows, arrays = [], []
        for target, part, tensor, name, shape in _parts(model, lora):
            array = adapters["lora"][target][part][tensor.layer].reshape(shape[::-1]).T
            if part == "b":
                array = array[np.argsort(_output_rows(tensor))]
            arrays.append(array if dtype is None else array.astype(jnp.dtype(dtype)))
            rows.append((name, arrays[-1].dtype, shape))
        write_file(unfinished / _WEIGHTS, rows, arrays)
        (unfinished / _CONFIG).write_text(json.dumps(told, indent=2, allow_nan=False))


def _parts(model: ModelConfig, lora: LoraConfig) -> Iterator[tuple[str, str, HfTensor, str, tuple[int, int]]]:
    """(target, a or b, the base's tensor, the file's name, the file's shape) in the order of the layers."""
    for tensor in hf_tensors(model):
        parents, target = tensor.leaves[0][:-1], tensor.leaves[0][-1]
        if parents != ("layers",) or target not in lora.targets:
            continue
        outputs, inputs = tensor.shape
        module = f"base_model.model.{tensor.name.removesuffix('.weight')}"
        yield target, "a", tensor, f"{module}.lora_A.weight", (lora.rank, inputs)
        yield target, "b", tensor, f"{module}.lora_B.weight", (outputs, lora.rank)


def _to_ours(tensor: HfTensor, part: str, array: np.ndarray) -> np.ndarray:
    """[r, inputs] -> [*inputs, r], or [outputs, r] -> [r, *outputs]."""
    cut = 1 if tensor.ours[0] == tensor.shape[1] else len(tensor.ours) - 1
    if part == "b":
        array = array[_output_rows(tensor)]
    return array.T.reshape((*tensor.ours[:cut], -1) if part == "a" else (-1, *tensor.ours[cut:]))


def _output_rows(tensor: HfTensor) -> np.ndarray:
    """Which row of the file's matrix each of our outputs is, in our order (int [outputs]): Llama 4 parts the pairs."""
    outputs = tensor.shape[0]
    if not tensor.pairs:
        return np.arange(outputs)
    one_input = replace(tensor, shape=(outputs, 1), view=(*tensor.view[:-1], 1))
    rows = np.empty(one_input.ours, int)
    out, part = one_input.place(0, rows, (slice(None),) * rows.ndim)
    out[...] = np.arange(outputs).reshape(one_input.view)[part]
    return rows.reshape(-1)
