"""Our parameter tree beside the tensors of a Hugging Face folder: names, shapes and transpositions, both directions.

A linear layer's rows are its outputs there; here input axes stand before output axes, and heads have an axis of their
own. Rotary pairs are (c, c + C/2) on both sides, so that no row moves.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxrl_llm.config import ModelConfig

HEAD = "lm_head.weight"
EMBED = "model.embed_tokens.weight"


@dataclass(frozen=True)
class HfTensor:
    """One tensor of the folder and the leaf (or the layer of a stacked leaf) that it is.

    `view` is the file's array with heads on an axis of their own; axis i of our array is the view's axis `order[i]`.
    """

    name: str
    leaf: tuple[str, ...]
    layer: int | None
    shape: tuple[int, ...]
    view: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def ours(self) -> tuple[int, ...]:
        """The shape of our array, without the axis of layers."""
        return tuple(self.view[axis] for axis in self.order)

    def to_hf(self, array: np.ndarray) -> np.ndarray:
        """The file's array, contiguous, from ours (without the axis of layers)."""
        return np.ascontiguousarray(array.transpose(np.argsort(self.order))).reshape(self.shape)


def hf_tensors(config: ModelConfig) -> Iterator[HfTensor]:
    """Every tensor of this model in the order of the forward pass; made one by one, so that a wild number of layers
    costs nothing before the first one is missed."""
    D, F, V = config.d_model, config.d_ff, config.vocab_size
    H, K, C = config.heads, config.kv_heads, config.head_dim
    post = config.post_norms
    # leaf: (name in a layer, the view's shape, the order that makes it ours)
    layer: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {
        "attn_norm": ("input_layernorm.weight", (D,), (0,)),
        "q": ("self_attn.q_proj.weight", (H, C, D), (2, 0, 1)),
        "k": ("self_attn.k_proj.weight", (K, C, D), (2, 0, 1)),
        "v": ("self_attn.v_proj.weight", (K, C, D), (2, 0, 1)),
        "o": ("self_attn.o_proj.weight", (D, H, C), (1, 2, 0)),
        "mlp_norm": (f"{'pre_feedforward' if post else 'post_attention'}_layernorm.weight", (D,), (0,)),
        "gate": ("mlp.gate_proj.weight", (F, D), (1, 0)),
        "up": ("mlp.up_proj.weight", (F, D), (1, 0)),
        "down": ("mlp.down_proj.weight", (D, F), (1, 0)),
    }
    if config.qkv_bias:
        layer |= {f"{x}_bias": (f"self_attn.{x}_proj.bias", (H if x == "q" else K, C), (0, 1)) for x in "qkv"}
    if config.qk_norm:
        layer |= {f"{x}_norm": (f"self_attn.{x}_norm.weight", (C,), (0,)) for x in "qk"}
    if post:
        layer["attn_post_norm"] = ("post_attention_layernorm.weight", (D,), (0,))
        layer["mlp_post_norm"] = ("post_feedforward_layernorm.weight", (D,), (0,))

    yield HfTensor(EMBED, ("embed",), None, (V, D), (V, D), (0, 1))
    for index in range(config.layers):
        for leaf, (name, view, order) in layer.items():
            shape = _merged_heads(view, order)
            yield HfTensor(f"model.layers.{index}.{name}", ("layers", leaf), index, shape, view, order)
    yield HfTensor("model.norm.weight", ("final_norm",), None, (D,), (D,), (0,))
    if not config.tie_embeddings:
        yield HfTensor(HEAD, ("head",), None, (V, D), (V, D), (0, 1))


def _merged_heads(view: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """The file's shape: heads and their width are one axis, in front for projections to heads and biases."""
    if len(view) == 3:
        return (view[0] * view[1], view[2]) if order[0] == 2 else (view[0], view[1] * view[2])
    return (view[0] * view[1],) if len(view) == 2 and order == (0, 1) else view


def is_derived(name: str) -> bool:
    """Tensors that some published files hold although they follow from the config: rotary frequencies."""
    return name.endswith(".rotary_emb.inv_freq")
