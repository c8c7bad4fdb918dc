"""A checkpoint that a command is given: a run directory, a Hugging Face folder, or a GGUF file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from jaxrl_llm.checkpoints.gguf import read_gguf_config, read_gguf_metadata, read_gguf_params, resolve_init
from jaxrl_llm.checkpoints.hf import TOKENIZER_FILES, HfFolder, is_hf_folder, open_hf, read_hf_params
from jaxrl_llm.checkpoints.hf_config import SHAPE_KEYS, to_hf_config
from jaxrl_llm.checkpoints.orbax import CheckpointStore
from jaxrl_llm.checkpoints.safetensors_file import FLOATS
from jaxrl_llm.cli.adapters import merged_params
from jaxrl_llm.config import ModelConfig, RunConfig, validate
from jaxrl_llm.types import Params, UserError

_GGUF_IDS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}


@dataclass(frozen=True)
class Policy:
    """Weights on the host, and what a Hugging Face folder has beside them: config.json and a tokenizer's files."""

    model: ModelConfig
    params: Params
    hf_config: Mapping[str, Any]
    beside: tuple[Path, ...]


def is_run(path: Path) -> bool:
    """Whether this is a run directory: it has a configuration and checkpoints."""
    return (path / "config.yaml").is_file() and (path / "checkpoints").is_dir()


def run_checkpoints(path: Path, step: int | None) -> tuple[RunConfig, CheckpointStore, int]:
    """A run's configuration, checkpoints and the step asked for (the newest by default). Raises UserError if none."""
    try:
        tree = yaml.safe_load((path / "config.yaml").read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{path / 'config.yaml'} cannot be read: {error}") from None
    config = validate(tree or {}, str(path / "config.yaml"))
    store = CheckpointStore(path / "checkpoints", keep=config.checkpoint.keep)
    if not (steps := store.steps()):
        raise UserError(f"{path} has no checkpoint yet")
    return config, store, steps[-1] if step is None else step


def read_policy(source: str, *, step: int | None = None, dtype: str | None = None, ema: bool = False) -> Policy:
    """Reads a whole policy; a LoRA run's is merged, in `dtype` (None: the base's). With `ema` a run's averaged weights.

    Raises UserError if the source is none of the three, damaged, or no known HF family.
    """
    path = Path(source)
    if is_run(path):
        config, store, step = run_checkpoints(path, step)
        model, params = config.model, merged_params(path, config, store.read_params(step, ema=ema), dtype)
        hf_config, beside = to_hf_config(model), ()
        if model.init is not None:
            hf_config, beside = _as_it_came(model, hf_config)
        return Policy(model, params, hf_config, beside)
    if step is not None or ema:
        raise UserError(f"{'--ema' if ema else f'--step {step}'} is given, but {source} is not a run directory")
    path = resolve_init(source)
    if is_hf_folder(path):
        folder = open_hf(path)
        return Policy(folder.model, read_hf_params(folder, _stored_dtype(folder)), folder.raw, _tokenizer_files(path))
    model = ModelConfig(**read_gguf_config(path))
    return Policy(model, read_gguf_params(path), to_hf_config(model) | _gguf_ids(path), ())


def _as_it_came(model: ModelConfig, generated: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[Path, ...]]:
    """config.json and tokenizer of the checkpoint that a run started from; what we make ourselves if that is gone."""
    try:
        path = resolve_init(str(model.init))
    except UserError:
        return generated, ()
    if not is_hf_folder(path):
        return dict(generated) | _gguf_ids(path), ()
    folder = open_hf(path)
    same = all(getattr(folder.model, key) == getattr(model, key) for key in SHAPE_KEYS if key != "max_context")
    return (folder.raw if same else generated), _tokenizer_files(path)


def _tokenizer_files(folder: Path) -> tuple[Path, ...]:
    return tuple(path for name in TOKENIZER_FILES if (path := folder / name).is_file())


def _gguf_ids(path: Path) -> dict[str, int]:
    metadata = read_gguf_metadata(path)
    ids = {ours: metadata.get(f"tokenizer.ggml.{theirs}_token_id") for theirs, ours in _GGUF_IDS.items()}
    return {name: value for name, value in ids.items() if isinstance(value, int)}


def _stored_dtype(folder: HfFolder) -> Any:
    """The folder's own dtype; float32, which holds them all, if its tensors differ."""
    kinds = {tensor.kind for tensor in folder.stored.values()}
    return FLOATS[kinds.pop()] if len(kinds) == 1 else "float32"
