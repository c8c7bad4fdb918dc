"""A Hugging Face `config.json` as our ModelConfig and back: a table of families, no class for any.

What each field means, and what stands where a published file leaves it out, is the family's own published
configuration. A field that is not known here is refused: it might change the forward pass.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pydantic

from jaxrl_llm.config import ModelConfig, RopeScalingConfig
from jaxrl_llm.types import UserError

_OURS = ("init", "param_dtype", "compute_dtype", "head_dtype", "attention")
SHAPE_KEYS = tuple(key for key in ModelConfig.model_fields if key not in _OURS)
"""The keys of ModelConfig that a checkpoint fixes."""

# Fields that leave the forward pass as it is: token ids, training, generation and bookkeeping.
IRRELEVANT = frozenset({
    "_attn_implementation_autoset", "_name_or_path", "architectures", "attention_dropout", "auto_map", "bad_words_ids",
    "begin_suppress_tokens", "bos_token_id", "cache_implementation", "chunk_size_feed_forward",
    "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype",
    "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty",
    "finetuning_task", "for_llm_compression", "forced_bos_token_id", "forced_eos_token_id", "id2label",
    "initializer_range", "is_llama_config", "label2id", "length_penalty", "max_length", "min_length",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions",
    "output_hidden_states", "output_router_logits", "output_scores", "pad_token_id", "prefix", "pretraining_tp",
    "problem_type", "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate",
    "router_aux_loss_coef", "sep_token_id", "suppress_tokens", "task_specific_params", "temperature", "tokenizer_class",
    "top_k", "top_p", "torch_dtype", "transformers.js_config", "transformers_version", "typical_p", "unsloth_fixed",
    "unsloth_version", "use_cache",
})  # fmt: skip

# Fields of which only these values are supported; absent counts as supported.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (None, 1, 1.0),
    "pruned_heads": ({},),
    "rope_interleaved": (False,),
    "router_jitter_noise": (0, 0.0),
    "tf_legacy_loss": (False, True),
    "tie_encoder_decoder": (False,),
    "torchscript": (False,),
    "use_bfloat16": (False,),
    "use_bidirectional_attention": (None, False),
    "use_mrope": (None, False),
}

_GEMMA = {"post_norms": True, "unit_offset_norms": True, "scale_embeddings": True}


@dataclass(frozen=True)
class _Family:
    """How one `model_type` reads its config: what it fixes, and the defaults its files rely on."""

    architecture: str
    windows: Literal["none", "all", "qwen", "layer_types", "unused", "llama4"]
    options: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = False  # where tie_word_embeddings is absent
    head_dim: bool = False  # whether the file must say it; else hidden_size / num_attention_heads
    rope_theta: float | None = None  # where rope_theta is absent
    local_every: int = 0  # where layer_types is absent: every so many layers is global
    width: str = "intermediate_size"  # the field that is d_ff


FAMILIES: Mapping[str, _Family] = {
    # Llama 2's files have no rope_theta (arXiv:2307.09288). SmolLM2 is a llama.
    "llama": _Family("LlamaForCausalLM", "none", rope_theta=10000.0),
    "mistral": _Family("MistralForCausalLM", "all"),
    "qwen2": _Family("Qwen2ForCausalLM", "qwen", {"qkv_bias": True}),
    "qwen3": _Family("Qwen3ForCausalLM", "qwen", {"qk_norm": True}, head_dim=True),
    # Mixtral: arXiv:2401.04088. In the next two every layer has experts.
    "mixtral": _Family("MixtralForCausalLM", "all", {"router_gate": "softmax_chosen"}),
    "qwen3_moe": _Family(
        "Qwen3MoeForCausalLM", "unused", {"qk_norm": True}, head_dim=True, width="moe_intermediate_size"
    ),
    "llama4_text": _Family("Llama4ForCausalLM", "llama4", {"router_gate": "sigmoid_input"}, head_dim=True),
    "gemma2": _Family("Gemma2ForCausalLM", "layer_types", _GEMMA, tied=True, head_dim=True, local_every=2),
    "gemma3_text": _Family(
        "Gemma3ForCausalLM", "layer_types", _GEMMA | {"qk_norm": True}, tied=True, head_dim=True, local_every=6
    ),
}

_REQUIRED: Any = object()


class _Fields:
    """Reads a JSON object field by field; what nobody has read at the end is unknown."""

    def __init__(self, raw: Mapping[str, Any], prefix: str = ""):
        self._raw, self._prefix, self._left = raw, prefix, set(raw)

    def _take(self, name: str, default: Any) -> Any:
        self._left.discard(name)
        value = self._raw.get(name, default)
        if value is _REQUIRED:
            raise UserError(f"field {self._prefix}{name} is missing")
        return value

    def number(self, name: str, kind: type, default: Any = _REQUIRED) -> Any:
        """A positive number, or the default (which also stands for null, where there is one)."""
        value = self._take(name, default)
        if value is None and default is not _REQUIRED:
            return default
        allowed = (int, float) if kind is float else (int,)
        if isinstance(value, bool) or not isinstance(value, allowed) or not 0 < value < math.inf:
            raise UserError(f"field {self._prefix}{name} is {value!r}; a positive {kind.__name__} is wanted")
        return kind(value)

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        if not isinstance(value := self._take(name, default), bool):
            raise UserError(f"field {self._prefix}{name} is {value!r}; true or false is wanted")
        return value

    def section(self, name: str) -> Mapping[str, Any] | None:
        value = self._take(name, None)
        if value is not None and not isinstance(value, Mapping):
            raise UserError(f"field {self._prefix}{name} is {value!r}; an object is wanted")
        return value

    def one_of(self, name: str, known: tuple[Any, ...], default: Any = _REQUIRED) -> Any:
        value = self._take(name, default)
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in known):
            raise UserError(f"field {self._prefix}{name} is {value!r}; supported: {', '.join(map(repr, known))}")
        return value

    def names(self, name: str, known: tuple[str, ...]) -> list[str] | None:
        value = self._take(name, None)
        if value is not None and not (isinstance(value, list) and set(map(str, value)) <= set(known)):
            raise UserError(f"field {self._prefix}{name} is {value!r}; a list of {' and '.join(known)} is wanted")
        return value

    def is_null(self, name: str) -> bool:
        return name in self._raw and self._raw[name] is None

    def bits(self, name: str) -> list[int] | None:
        value = self._take(name, None)
        if value is not None and not (isinstance(value, list) and all(type(x) is int and x in (0, 1) for x in value)):
            raise UserError(f"field {self._prefix}{name} is {value!r}; a list of 0 and 1 is wanted")
        return value

    def ignore(self, name: str) -> None:
        self._left.discard(name)

    def finish(self) -> None:
        if self._left:
            first = sorted(self._left)[0]
            raise UserError(
                f"field {self._prefix}{first} = {self._raw[first]!r} is unknown: it may change what the model computes"
            )


def from_hf_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The decoder that a Hugging Face `config.json` describes; see FAMILIES for the `model_type`s.

    `max_context` is max_position_embeddings. Accepts the layout of transformers 4 (rope_theta, rope_scaling,
    rope_local_base_freq) and of 5 (rope_parameters).
    Raises UserError naming the field that is missing, of a value that is not supported, or unknown.
    """
    fields = _Fields(raw)
    family_name = fields.one_of("model_type", tuple(FAMILIES))
    family = FAMILIES[family_name]
    for name in IRRELEVANT:
        fields.ignore(name)
    for name, values in _ONLY.items():
        fields.one_of(name, values, values[0])
    gemma = family.windows == "layer_types"
    heads, d_model = fields.number("num_attention_heads", int), fields.number("hidden_size", int)
    if not family.head_dim and raw.get("head_dim") is None and d_model % heads:
        raise UserError(f"field hidden_size = {d_model} is not a multiple of num_attention_heads = {heads}")
    head_dim = fields.number("head_dim", int, _REQUIRED if family.head_dim else d_model // heads)
    if gemma:
        fields.ignore("hidden_act")  # published files have both; this one is not read
        fields.one_of("hidden_activation", ("gelu_pytorch_tanh",))
    else:
        fields.one_of("hidden_act", ("silu",))
    shape: dict[str, Any] = dict(family.options) | {
        "layers": fields.number("num_hidden_layers", int),
        "d_model": d_model,
        "heads": heads,
        "kv_heads": fields.number("num_key_value_heads", int),
        "head_dim": head_dim,
        "d_ff": fields.number(family.width, int),
        "vocab_size": fields.number("vocab_size", int),
        "norm_eps": fields.number("rms_norm_eps", float),
        "max_context": fields.number("max_position_embeddings", int),
        "tie_embeddings": fields.flag("tie_word_embeddings", family.tied),
        "activation": "gelu_tanh" if gemma else "silu",
    }
    shape |= _experts(fields, family_name, shape)
    shape |= _windows(fields, family, shape["layers"])
    if gemma:
        scalar = fields.number("query_pre_attn_scalar", float)
        shape["query_pre_attn_scalar"] = None if scalar == head_dim else scalar
        absent = _REQUIRED if family_name == "gemma2" else None
        for name in ("attention", "final"):
            field_name = "attn_logit_softcapping" if name == "attention" else "final_logit_softcapping"
            # Gemma 2 may switch a cap off by null, but may not leave the field out.
            given = field_name in raw and raw[field_name] is None
            shape[f"{name}_softcap"] = fields.number(field_name, float, None if given else absent)
    shape |= _rope(fields, family, family_name, shape)
    fields.finish()
    try:
        return ModelConfig(**shape)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{'.'.join(map(str, first['loc']))} {first['msg'].removeprefix('Value error, ')}") from None


def _windows(fields: _Fields, family: _Family, layers: int) -> dict[str, Any]:
    """attention_pattern and window."""
    if family.windows == "none":
        return {}
    if family.windows == "llama4":
        return _llama4_layers(fields, layers)
    if family.windows == "unused":
        # The architecture would take a window for all layers; no published file has one.
        fields.one_of("use_sliding_window", (False,), False)
        fields.ignore("sliding_window")
        fields.ignore("max_window_layers")
        return {}
    if family.windows == "all":
        window = fields.number("sliding_window", int, None)
        return {} if window is None else {"attention_pattern": "L", "window": window}
    kinds = fields.names("layer_types", ("full_attention", "sliding_attention"))
    window = fields.number("sliding_window", int, None)
    if family.windows == "qwen":
        fields_use, first_local = (
            fields.flag("use_sliding_window", False),
            fields.number("max_window_layers", int, None),
        )
        if not fields_use:
            if kinds and "sliding_attention" in kinds:
                raise UserError("field use_sliding_window is false, but layer_types has sliding_attention")
            return {}
        pattern = ["L" if first_local is not None and layer >= first_local else "G" for layer in range(layers)]
        if kinds is None and first_local is None:
            raise UserError("field max_window_layers is missing: use_sliding_window is true")
    else:
        every = fields.number("sliding_window_pattern", int, None)
        every = fields.number("_sliding_window_pattern", int, None) or every or family.local_every
        pattern = ["G" if (layer + 1) % every == 0 else "L" for layer in range(layers)]
    if kinds is not None:
        if len(kinds) != layers:
            raise UserError(f"field layer_types names {len(kinds)} layers, num_hidden_layers is {layers}")
        pattern = ["L" if kind == "sliding_attention" else "G" for kind in kinds]
    if "L" not in pattern:
        return {}
    if window is None:
        raise UserError("field sliding_window is missing: some layers use sliding_attention")
    return {"attention_pattern": _shortest_period("".join(pattern)), "window": window}


def _experts(fields: _Fields, family_name: str, shape: Mapping[str, Any]) -> dict[str, Any]:
    """What there is of experts. Layers are stacked, so all must have them."""
    layers = shape["layers"]
    if family_name not in ("mixtral", "qwen3_moe", "llama4_text"):
        return {}
    found: dict[str, Any] = {"experts_per_token": fields.number("num_experts_per_tok", int)}
    if family_name == "qwen3_moe":
        fields.ignore("intermediate_size")  # of dense layers, of which there are none
        fields.one_of("decoder_sparse_step", (1,))
        fields.one_of("mlp_only_layers", ([], None), [])
        gate = "softmax_chosen" if fields.flag("norm_topk_prob") else "softmax"
        # transformers 5 writes what published files call num_experts under the other families' name.
        experts = fields.number("num_local_experts", int, None) or fields.number("num_experts", int)
        return found | {"experts": experts, "router_gate": gate}
    found["experts"] = fields.number("num_local_experts", int)
    if family_name == "llama4_text":
        fields.ignore("intermediate_size_mlp")  # of dense layers, as above
        fields.one_of("interleave_moe_layer_step", (1,))
        fields.one_of("moe_layers", (None, list(range(layers))), None)
        found |= {"shared_expert_d_ff": shape["d_ff"], "qk_unit_norm": fields.flag("use_qk_norm")}
    return found


def _llama4_layers(fields: _Fields, layers: int) -> dict[str, Any]:
    """Which layers have rotary positions and which of these see a chunk only, and the temperature of the others."""
    whole = fields.is_null("attention_chunk_size")
    chunk = fields.number("attention_chunk_size", int, None if whole else _REQUIRED)
    every = fields.number("no_rope_layer_interval", int, 4)
    # 1 is a layer with rotary positions, whatever the name says; published files leave the list empty.
    turns = fields.bits("no_rope_layers") or [(n + 1) % every != 0 for n in range(layers)]
    if len(turns) != layers:
        raise UserError(f"field no_rope_layers has {len(turns)} entries, num_hidden_layers is {layers}")
    rotary = "G" if chunk is None else "C"
    pattern = "".join(rotary if turn else "N" for turn in turns)
    kinds = ["chunked_attention" if kind == "C" else "full_attention" for kind in pattern]
    fields.one_of("layer_types", (None, kinds), None)
    # An early release of the files has 4 for true.
    tuned = fields.one_of("attn_temperature_tuning", (True, False, 4), True)
    span, scale = fields.number("floor_scale", int, 8192), fields.number("attn_scale", float, 0.1)
    found: dict[str, Any] = {"attention_pattern": _shortest_period(pattern)}
    if "C" in pattern:
        found["attention_chunk"] = chunk
    if tuned and "N" in pattern:
        found |= {"query_temperature_every": span, "query_temperature_scale": scale}
    return found


def _shortest_period(pattern: str) -> str:
    whole = len(pattern)
    return next(p for n in range(1, whole + 1) if ((p := pattern[:n]) * (whole // n + 1))[:whole] == pattern)


def _rope(fields: _Fields, family: _Family, family_name: str, shape: Mapping[str, Any]) -> dict[str, Any]:
    """rope_theta, rope_scaling and local_rope_theta."""
    context, has_local = shape["max_context"], "L" in shape.get("attention_pattern", "G")
    rope = fields.section("rope_parameters")
    local: float | None = None
    if rope is None:
        theta = fields.number("rope_theta", float, family.rope_theta or _REQUIRED)
        scaling = fields.section("rope_scaling") or {}
        where = "rope_scaling."
        if family_name == "gemma3_text":
            local = fields.number("rope_local_base_freq", float)
    elif family_name == "gemma3_text":
        nested = _Fields(rope, "rope_parameters.")
        scaling, local_rope = nested.section("full_attention") or {}, nested.section("sliding_attention") or {}
        nested.finish()
        where = "rope_parameters.full_attention."
        theta, scaling = _theta(scaling, where)
        local, rest = _theta(local_rope, "rope_parameters.sliding_attention.")
        if _scaling(_Fields(rest, "rope_parameters.sliding_attention."), context).kind != "none":
            raise UserError("field rope_parameters.sliding_attention scales its frequencies, which is not supported")
    else:
        where = "rope_parameters."
        theta, scaling = _theta(rope, where)
    return {
        "rope_theta": theta,
        "rope_scaling": _scaling(_Fields(scaling, where), context),
        "local_rope_theta": local if has_local else None,
    }


def _theta(rope: Mapping[str, Any], where: str) -> tuple[float, dict[str, Any]]:
    theta = _Fields(rope, where).number("rope_theta", float)
    return theta, {name: value for name, value in rope.items() if name != "rope_theta"}


def _scaling(fields: _Fields, max_context: int) -> RopeScalingConfig:
    kinds = ("default", "linear", "dynamic", "llama3", "yarn")
    old = fields.one_of("type", kinds, "default")  # the older name of rope_type
    kind = fields.one_of("rope_type", kinds, old)
    fields.one_of("partial_rotary_factor", (None, 1, 1.0), None)
    constants: dict[str, Any] = {}
    if kind != "default":
        constants["factor"] = fields.number("factor", float)
    if kind == "dynamic":
        constants["original_context"] = fields.number("original_max_position_embeddings", int, max_context)
    if kind in ("llama3", "yarn"):
        constants["original_context"] = fields.number("original_max_position_embeddings", int)
    if kind == "llama3":
        constants |= {name: fields.number(name, float) for name in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        fields.one_of("truncate", (None, True), None)
        constants |= {"beta_fast": fields.number("beta_fast", float, 32.0)}
        constants |= {"beta_slow": fields.number("beta_slow", float, 1.0)}
        factor = constants["factor"]
        above, below = fields.number("mscale", float, None), fields.number("mscale_all_dim", float, None)
        default = _yarn_factor(factor, above) / _yarn_factor(factor, below) if above and below else _yarn_factor(factor)
        constants["attention_factor"] = fields.number("attention_factor", float, default)
    fields.finish()
    try:
        return RopeScalingConfig(kind="none" if kind == "default" else kind, **constants)
    except pydantic.ValidationError as error:
        raise UserError(f"rope scaling: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None


def _yarn_factor(factor: float, weight: float = 1.0) -> float:
    """What arXiv:2309.00071 (section 3.4) multiplies queries and keys by."""
    return 0.1 * weight * math.log(factor) + 1.0


def is_nested(raw: Mapping[str, Any]) -> bool:
    """Whether this is the config of a model that sees images too, of which the text part is supported."""
    return raw.get("model_type") == "llama4"


def text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text part of a nested config, as a config of its own. Raises UserError if it has none."""
    if not isinstance(part := raw.get("text_config"), Mapping):
        raise UserError("field text_config is missing")
    return {"architectures": [FAMILIES["llama4_text"].architecture]} | dict(part)


def to_hf_config(model: ModelConfig) -> dict[str, Any]:
    """A `config.json` that describes this decoder, in the layout of transformers 4, which version 5 reads too.

    Raises UserError naming the first key that no known family can express. With dynamic scaling,
    max_position_embeddings is `rope_scaling.original_context`, whatever `max_context` is.
    """
    name = family_of(model)
    family, scaling = FAMILIES[name], model.rope_scaling
    out: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": name,
        "hidden_size": model.d_model,
        "intermediate_size": model.d_ff,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "rms_norm_eps": model.norm_eps,
        "max_position_embeddings": scaling.original_context if scaling.kind == "dynamic" else model.max_context,
        "tie_word_embeddings": model.tie_embeddings,
        "rope_theta": model.rope_theta,
        "rope_scaling": _hf_scaling(scaling),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "attention_dropout": 0.0,
    }
    pattern = _every_layer(model)
    kinds = ["sliding_attention" if kind == "L" else "full_attention" for kind in pattern]
    if family.windows == "layer_types":
        out |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": _whole(model.query_pre_attn_scalar or model.head_dim),
            "attn_logit_softcapping": model.attention_softcap,
            "final_logit_softcapping": model.final_softcap,
            "sliding_window": model.window,
            "layer_types": kinds,
        }
    else:
        out["hidden_act"] = "silu"
    if family.windows == "all":
        out["sliding_window"] = model.window
    if model.experts is not None:
        out["num_experts_per_tok"] = model.experts_per_token
        out["num_experts" if name == "qwen3_moe" else "num_local_experts"] = model.experts
    if name == "qwen3_moe":
        out |= {"moe_intermediate_size": model.d_ff, "norm_topk_prob": model.router_gate == "softmax_chosen"}
        out |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False, "sliding_window": None}
    if name == "llama4_text":
        out |= {
            "intermediate_size_mlp": model.d_ff,
            "interleave_moe_layer_step": 1,
            "use_qk_norm": model.qk_unit_norm,
            "no_rope_layers": [int(kind != "N") for kind in pattern],
            "attention_chunk_size": model.attention_chunk,
            "attn_temperature_tuning": model.query_temperature_every is not None,
            "attention_bias": False,
        }
        if model.query_temperature_every is not None:
            out |= {"floor_scale": model.query_temperature_every, "attn_scale": model.query_temperature_scale}
    if family.windows == "qwen" and model.window is not None:
        out |= {"use_sliding_window": True, "sliding_window": model.window, "layer_types": kinds}
        out["max_window_layers"] = max(pattern.find("L"), 1)
    if name == "gemma3_text":
        out["rope_local_base_freq"] = model.local_rope_theta or model.rope_theta
    told, wanted = _comparable(from_hf_config(out)), _comparable(model)
    if changed := [key for key in SHAPE_KEYS if told[key] != wanted[key]]:
        raise UserError(
            f"model.{changed[0]} = {getattr(model, changed[0])} cannot be said in a Hugging Face config of the "
            f"{name} family; known families: {', '.join(FAMILIES)}"
        )
    return out


def family_of(model: ModelConfig) -> str:
    """The family whose files say what this model's options are; whether they can say all of it is not looked at."""
    if model.experts is not None:
        gated = model.router_gate in ("sigmoid", "sigmoid_input")
        return "llama4_text" if gated else "qwen3_moe" if model.qk_norm else "mixtral"
    if model.post_norms:
        return "gemma3_text" if model.qk_norm else "gemma2"
    if model.qk_norm or model.qkv_bias:
        return "qwen3" if model.qk_norm else "qwen2"
    return "llama" if model.window is None else "mistral"


def _every_layer(model: ModelConfig) -> str:
    return (model.attention_pattern * model.layers)[: model.layers]


def _comparable(model: ModelConfig) -> dict[str, Any]:
    """The shape with what can be written in two ways written in one."""
    shape = {key: getattr(model, key) for key in SHAPE_KEYS}
    shape["attention_pattern"] = _every_layer(model)
    shape["query_pre_attn_scalar"] = model.query_pre_attn_scalar or model.head_dim
    if model.post_norms and model.qk_norm and model.window is not None:
        local = model.local_rope_theta or (model.rope_theta if model.rope_scaling.kind == "none" else None)
        shape["local_rope_theta"] = local
    if model.rope_scaling.kind == "dynamic":
        shape["max_context"] = None
    return shape


def _whole(number: float) -> float | int:
    return int(number) if float(number).is_integer() else number


def _hf_scaling(scaling: RopeScalingConfig) -> dict[str, Any] | None:
    if scaling.kind == "none":
        return None
    out: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("llama3", "yarn"):
        out["original_max_position_embeddings"] = scaling.original_context
    for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"):
        if (value := getattr(scaling, name)) is not None:
            out[name] = value
    return out
