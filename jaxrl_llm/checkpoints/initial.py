"""What `model.init` names, whatever its format: the decoder's shape, and its weights."""

from typing import Any

from jaxrl_llm.checkpoints.gguf import read_gguf_config, read_gguf_params, resolve_init
from jaxrl_llm.checkpoints.hf import is_hf_folder, open_hf, read_hf_params
from jaxrl_llm.checkpoints.hf_config import SHAPE_KEYS
from jaxrl_llm.config import ModelConfig
from jaxrl_llm.types import Params


def initial_shape(init: str) -> dict[str, Any]:
    """Every key of ModelConfig that the checkpoint fixes (SHAPE_KEYS); no weights are read.

    Raises UserError as `resolve_init`, `open_hf` and `read_gguf_config`.
    """
    path = resolve_init(init)
    model = open_hf(path).model if is_hf_folder(path) else ModelConfig(**read_gguf_config(path))
    return {key: getattr(model, key) for key in SHAPE_KEYS}


def initial_weights(init: str, dtype: Any, shardings: Params) -> Params:
    """The weights in `dtype`: jax arrays placed by `shardings` from a folder, numpy arrays from a GGUF file.

    Raises UserError as `initial_shape`, and naming a tensor whose numbers are damaged.
    """
    path = resolve_init(init)
    if is_hf_folder(path):
        return read_hf_params(open_hf(path), dtype, shardings)
    return read_gguf_params(path, dtype)
