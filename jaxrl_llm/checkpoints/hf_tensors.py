"""Our parameter tree beside the tensors of a Hugging Face folder: names, shapes and transpositions, both directions.

A linear layer's rows are its outputs there; here input axes stand before output axes, and heads have an axis of their
own. Rotary pairs are (c, c + C/2) here, and there too except in Llama 4, whose pairs (2c, 2c + 1) are parted. Experts
are one stacked array here, a tensor each in Mixtral and Qwen3, one tensor with gates and ups side by side in Llama 4.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxrl_llm.checkpoints.hf_config import family_of
from jaxrl_llm.config import ModelConfig

HEAD = "lm_head.weight"
EMBED = "model.embed_tokens.weight"
TEXT = "language_model."
"""What the text part's tensors begin with, in a folder that holds more than text."""
OTHERS = ("vision_model.", "multi_modal_projector.")
"""What the other parts' tensors begin with."""


@dataclass(frozen=True)
class HfTensor:
    """One tensor of the folder and the leaves (or the part of a stacked leaf) that it is.

    `view` is the file's array with heads on an axis of their own; axis i of our array is the view's axis `order[i]`.
    `index` is the layer, or the layer and the expert, inside a stacked leaf. Where there are several leaves, the first
    axis of the view in this order counts them. With `pairs` its last two axes are one of ours.
    """

    name: str
    leaves: tuple[tuple[str, ...], ...]
    index: tuple[int, ...]
    shape: tuple[int, ...]
    view: tuple[int, ...]
    order: tuple[int, ...]
    pairs: bool = False

    @property
    def layer(self) -> int | None:
        return self.index[0] if self.index else None

    @property
    def ours(self) -> tuple[int, ...]:
        """The shape of our array (of each of our arrays), without the axes of `index`."""
        shape = tuple(self.view[axis] for axis in self.order[len(self.leaves) > 1 :])
        return (*shape[:-2], shape[-2] * shape[-1]) if self.pairs else shape

    def place(self, leaf: int, out: np.ndarray, part: tuple[slice, ...]) -> tuple[np.ndarray, tuple[slice, ...]]:
        """`out`, a part (slices of our axes) of the `leaf`-th array, as a part of the view, and that part's slices.

        With `pairs` the last axis must be whole.
        """
        if self.pairs:
            out, part = out.reshape(*out.shape[:-1], 2, -1), (*part[:-1], slice(None), slice(None))
        if len(self.leaves) > 1:
            out, part = out[None], (slice(leaf, leaf + 1), *part)
        back = np.argsort(self.order)
        return out.transpose(back), tuple(part[axis] for axis in back)

    def to_hf(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """The file's array, contiguous, from ours (without the axes of `index`)."""
        out = np.empty(self.view, arrays[0].dtype)
        for leaf, array in enumerate(arrays):
            array, part = self.place(leaf, array, (slice(None),) * array.ndim)
            out[part] = array
        return out.reshape(self.shape)


class _Row(NamedTuple):
    """A tensor of every layer (with {expert} in its name: of every expert): our leaves, then HfTensor's fields."""

    leaves: tuple[str, ...]
    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    order: tuple[int, ...]
    pairs: bool = False


def hf_tensors(config: ModelConfig) -> Iterator[HfTensor]:
    """Every tensor of this model in the order of the forward pass; made one by one, so that a wild number of layers
    costs nothing before the first one is missed."""
    D, V = config.d_model, config.vocab_size
    rows = [*_attention(config), *(_dense(config) if config.experts is None else _experts(config, config.experts))]
    yield HfTensor(EMBED, (("embed",),), (), (V, D), (V, D), (0, 1))
    for layer in range(config.layers):
        for leaves, suffix, shape, view, order, pairs in rows:
            paths, name = tuple(("layers", leaf) for leaf in leaves), f"model.layers.{layer}.{suffix}"
            if "{expert}" not in name:
                yield HfTensor(name, paths, (layer,), shape, view, order, pairs)
                continue
            for expert in range(config.experts or 0):
                yield HfTensor(name.format(expert=expert), paths, (layer, expert), shape, view, order, pairs)
    yield HfTensor("model.norm.weight", (("final_norm",),), (), (D,), (D,), (0,))
    if not config.tie_embeddings:
        yield HfTensor(HEAD, (("head",),), (), (V, D), (V, D), (0, 1))


def _norm(leaf: str, name: str, width: int) -> _Row:
    return _Row((leaf,), f"{name}.weight", (width,), (width,), (0,))


def _matrix(leaf: str, name: str, outputs: int, inputs: int) -> _Row:
    return _Row((leaf,), f"{name}.weight", (outputs, inputs), (outputs, inputs), (1, 0))


def _attention(config: ModelConfig) -> Iterator[_Row]:
    """Everything of a layer but its feed-forward."""
    D, C, post = config.d_model, config.head_dim, config.post_norms
    heads = {"q": config.heads, "k": config.kv_heads, "v": config.kv_heads}
    yield _norm("attn_norm", "input_layernorm", D)
    for x, n in heads.items():
        name = f"self_attn.{x}_proj.weight"
        if family_of(config) == "llama4_text" and x != "v":
            yield _Row((x,), name, (n * C, D), (n, C // 2, 2, D), (3, 0, 2, 1), pairs=True)
        else:
            yield _Row((x,), name, (n * C, D), (n, C, D), (2, 0, 1))
    yield _Row(("o",), "self_attn.o_proj.weight", (D, config.heads * C), (D, config.heads, C), (1, 2, 0))
    if config.qkv_bias:
        for x, n in heads.items():
            yield _Row((f"{x}_bias",), f"self_attn.{x}_proj.bias", (n * C,), (n, C), (0, 1))
    if config.qk_norm:
        yield from (_norm(f"{x}_norm", f"self_attn.{x}_norm", C) for x in "qk")
    yield _norm("mlp_norm", f"{'pre_feedforward' if post else 'post_attention'}_layernorm", D)
    if post:
        yield _norm("attn_post_norm", "post_attention_layernorm", D)
        yield _norm("mlp_post_norm", "post_feedforward_layernorm", D)


def _dense(config: ModelConfig) -> Iterator[_Row]:
    D, F = config.d_model, config.d_ff
    yield _matrix("gate", "mlp.gate_proj", F, D)
    yield _matrix("up", "mlp.up_proj", F, D)
    yield _matrix("down", "mlp.down_proj", D, F)


def _experts(config: ModelConfig, E: int) -> Iterator[_Row]:
    D, F, family = config.d_model, config.d_ff, family_of(config)
    if family == "llama4_text":
        yield _matrix("router", "feed_forward.router", E, D)
        both, name = ("expert_gate", "expert_up"), "feed_forward.experts.gate_up_proj"
        yield _Row(both, name, (E, D, 2 * F), (E, D, 2, F), (2, 0, 1, 3))
        yield _Row(("expert_down",), "feed_forward.experts.down_proj", (E, F, D), (E, F, D), (0, 1, 2))
        for x, outputs, inputs in (("gate", F, D), ("up", F, D), ("down", D, F)):
            yield _matrix(f"shared_{x}", f"feed_forward.shared_expert.{x}_proj", outputs, inputs)
        return
    block = "block_sparse_moe" if family == "mixtral" else "mlp"
    names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    yield _matrix("router", f"{block}.gate", E, D)
    for x, name in zip(("gate", "up", "down"), names, strict=True):
        outputs, inputs = (D, F) if x == "down" else (F, D)
        yield _matrix(f"expert_{x}", f"{block}.experts.{{expert}}.{name}", outputs, inputs)


def is_derived(name: str) -> bool:
    """Tensors that some published files hold although they follow from the config: rotary frequencies."""
    return name.endswith(".rotary_emb.inv_freq")
