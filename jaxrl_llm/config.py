"""The typed configuration of a run: frozen sections, unknown keys refused with the nearest valid name.

Every key is explained once, in its `Field(description=...)`; `jaxrl config show` and `jaxrl train --help` print those
texts. Files are YAML with `extends: other.yaml`; the command line adds dotted overrides such as `optimizer.lr=1e-6`.
"""

import difflib
import math
import re
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pydantic
import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from jaxrl_llm.types import UserError

# YAML 1.1 reads 1e-6 (no dot) as a string; people write it all the time.
_FLOAT_TEXT = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


def _read_number(value: Any) -> Any:
    if isinstance(value, str) and _FLOAT_TEXT.fullmatch(value.strip()):
        value = float(value)
    if isinstance(value, bool):
        raise ValueError("a number is wanted, not true or false")
    return value


def _read_integer(value: Any) -> Any:
    value = _read_number(value)
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return int(value)
    return value


Float = Annotated[float, BeforeValidator(_read_number), Field(strict=True, allow_inf_nan=False)]
Int = Annotated[int, BeforeValidator(_read_integer), Field(strict=True)]
Bool = Annotated[bool, Field(strict=True)]


def _read_constant(value: Any) -> Any:
    return value if isinstance(value, bool) else _read_number(value)


Constant = Annotated[
    Annotated[float, Field(strict=True, allow_inf_nan=False)] | Bool | str, BeforeValidator(_read_constant)
]
"""A constant of an importance correction: a number, a switch, or the name of an anchor."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RopeScalingConfig(Section):
    """How rotary frequencies are stretched beyond the context a model was first trained for; see models/rope.py."""

    kind: Literal["none", "linear", "dynamic", "llama3", "yarn"] = Field(
        "none",
        description="none; linear: all frequencies divided by factor; dynamic: a larger base for a max_context beyond original_context; llama3: long wavelengths divided, short ones kept (Llama 3.1); yarn: a ramp between the two (arXiv:2309.00071)",
    )
    factor: Float = Field(1.0, ge=1, description="how many times longer the context becomes")
    original_context: Int | None = Field(
        None, gt=1, description="dynamic, llama3, yarn: tokens of context before the scaling"
    )
    low_freq_factor: Float | None = Field(
        None, gt=0, description="llama3: wavelengths above original_context over this are divided by factor"
    )
    high_freq_factor: Float | None = Field(
        None, gt=0, description="llama3: wavelengths below original_context over this are kept"
    )
    beta_fast: Float | None = Field(
        None, gt=0, description="yarn: pairs that turn more often than this within original_context are kept"
    )
    beta_slow: Float | None = Field(
        None, gt=0, description="yarn: pairs that turn less often than this are divided by factor"
    )
    attention_factor: Float | None = Field(
        None, gt=0, description="yarn: queries and keys are multiplied by this after rotation"
    )

    @model_validator(mode="after")
    def _takes_its_own_constants(self):
        wanted = _ROPE_CONSTANTS[self.kind]
        for name in _ROPE_CONSTANTS["llama3"] + _ROPE_CONSTANTS["yarn"]:
            given = getattr(self, name) is not None
            if given != (name in wanted):
                raise ValueError(
                    f"{name} is {'not a constant of' if given else 'missing, which is needed by'} {self.kind}"
                )
        if self.kind == "none" and self.factor != 1:
            raise ValueError(f"factor {self.factor} is given, but kind is none")
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            # Llama 4 has two equal factors: a step instead of a ramp.
            equal = low == "low_freq_factor" and getattr(self, low) == getattr(self, high)
            if low in wanted and not (equal or getattr(self, low) < getattr(self, high)):
                raise ValueError(f"{low} {getattr(self, low)} is not below {high} {getattr(self, high)}")
        return self


_ROPE_CONSTANTS: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": (),
    "dynamic": ("original_context",),
    "llama3": ("original_context", "low_freq_factor", "high_freq_factor"),
    "yarn": ("original_context", "beta_fast", "beta_slow", "attention_factor"),
}


class ModelConfig(Section):
    """The decoder's shape. With `init` set, the shape is read from the weights' file and must not be given."""

    init: str | None = Field(
        None,
        description="weights to start from: a Hugging Face folder (config.json and safetensors), `hub:OWNER/NAME[@REVISION]` from the Hugging Face Hub, a GGUF file or `package:NAME` (a GGUF file inside an installed Python package); none means random",
    )
    layers: Int = Field(2, gt=0, description="number of decoder layers")
    d_model: Int = Field(64, gt=0, description="width of the residual stream")
    heads: Int = Field(4, gt=0, description="query heads")
    kv_heads: Int = Field(4, gt=0, description="key/value heads; must divide heads")
    head_dim: Int = Field(16, gt=0, description="width of one head (even, for rotary positions)")
    d_ff: Int = Field(256, gt=0, description="width of the gated feed-forward layer; with experts, of each of them")
    experts: Int | None = Field(
        None,
        gt=1,
        description="feed-forward networks of every layer between which a router chooses; null is one, dense",
    )
    experts_per_token: Int | None = Field(None, gt=0, description="experts: how many of them each token goes through")
    shared_expert_d_ff: Int | None = Field(
        None, gt=0, description="experts: width of one more that every token goes through (Llama 4); null is none"
    )
    router_gate: Literal["softmax", "softmax_chosen", "sigmoid", "sigmoid_input"] | None = Field(
        None,
        description="experts: what weighs the chosen ones' outputs: softmax over all, softmax over the chosen (Mixtral, Qwen3), a sigmoid of each one's logit; sigmoid_input weighs their inputs with it (Llama 4)",
    )
    vocab_size: Int = Field(
        64, gt=1, description="rows of the embedding; set from the tokenizer when it is built by the project"
    )
    rope_theta: Float = Field(10000.0, gt=0, description="base of the rotary position frequencies")
    rope_scaling: RopeScalingConfig = RopeScalingConfig()
    attention_pattern: Annotated[str, Field(pattern="^[GLCN]+$")] = Field(
        "G",
        description="what the layers attend to, repeated over them: G global, L local (the last `window` tokens), C the tokens of the same chunk, N global without rotary positions; Gemma 3 is LLLLLG, Llama 4 CCCN",
    )
    window: Int | None = Field(
        None, gt=0, description="tokens that a local layer sees, the present one included; null where no layer is local"
    )
    attention_chunk: Int | None = Field(
        None, gt=0, description="tokens of a chunk, counted from the first of a sequence; null where no layer is C"
    )
    query_temperature_every: Int | None = Field(
        None,
        gt=0,
        description="N layers' queries at position p are multiplied by 1 + query_temperature_scale x log(1 + floor((p + 1) / this)) (Llama 4); null turns it off",
    )
    query_temperature_scale: Float | None = Field(None, gt=0, description="see query_temperature_every")
    local_rope_theta: Float | None = Field(
        None,
        gt=0,
        description="base of the local layers' rotary frequencies, unscaled (Gemma 3); null is as the others",
    )
    qk_norm: Bool = Field(False, description="RMS norms of every query and key head before rotation (Qwen3, Gemma 3)")
    qk_unit_norm: Bool = Field(
        False, description="RMS norms without weights of queries and keys after rotation, not in N layers (Llama 4)"
    )
    qkv_bias: Bool = Field(False, description="biases of the query, key and value projections (Qwen2)")
    query_pre_attn_scalar: Float | None = Field(
        None, gt=0, description="attention scores are divided by the root of this (Gemma); null is head_dim"
    )
    attention_softcap: Float | None = Field(
        None, gt=0, description="attention scores x become c tanh(x / c) (Gemma 2); null turns it off"
    )
    final_softcap: Float | None = Field(
        None, gt=0, description="logits x become c tanh(x / c), before the temperature (Gemma 2); null turns it off"
    )
    activation: Literal["silu", "gelu_tanh"] = Field(
        "silu", description="of the gate: silu makes SwiGLU, gelu_tanh (the tanh approximation) GeGLU"
    )
    post_norms: Bool = Field(
        False, description="RMS norms of what attention and feed-forward add to the residual stream (Gemma)"
    )
    unit_offset_norms: Bool = Field(False, description="RMS norms multiply by 1 + their weight (Gemma)")
    scale_embeddings: Bool = Field(False, description="embeddings are multiplied by the root of d_model (Gemma)")
    norm_eps: Float = Field(1e-5, gt=0, description="epsilon of the RMS norms")
    tie_embeddings: Bool = Field(True, description="use the embedding as the output head")
    max_context: Int = Field(64, gt=1, description="longest prompt plus completion, in tokens")
    param_dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of the trainer's parameters")
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="dtype of activations; the head has head_dtype"
    )
    head_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="dtype of the output head's products and logits, in trainer and sampler: float32 at the highest precision; bfloat16 is the ablation of ScaleRL, refused with a `recipe`",
    )
    attention: Literal["auto", "xla", "cudnn", "splash"] = Field(
        "auto",
        description="attention of training and scoring: splash is a kernel for TPU, cudnn one for GPU (bfloat16, no soft cap), xla runs anywhere; auto is the trainer's device's kernel where that can run the model, else xla",
    )

    @model_validator(mode="after")
    def _fits_together(self):
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary positions need an even width")
        if ("L" in self.attention_pattern) != (self.window is not None):
            raise ValueError(
                f"attention_pattern {self.attention_pattern!r} and window {self.window} do not fit: local layers (L) "
                "need a window, and a window needs local layers"
            )
        if ("C" in self.attention_pattern) != (self.attention_chunk is not None):
            raise ValueError(
                f"attention_pattern {self.attention_pattern!r} and attention_chunk {self.attention_chunk} do not fit: "
                "chunked layers (C) need it, and it needs chunked layers"
            )
        if (self.query_temperature_every is None) != (self.query_temperature_scale is None):
            raise ValueError("query_temperature_every and query_temperature_scale are given together or not at all")
        if self.query_temperature_every is not None and "N" not in self.attention_pattern:
            raise ValueError("query_temperature_every is given, but attention_pattern has no layer without rope (N)")
        if self.experts is None:
            for name in ("experts_per_token", "shared_expert_d_ff", "router_gate"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is given, but experts is null")
        elif self.experts_per_token is None or self.router_gate is None:
            raise ValueError(f"experts is {self.experts}: experts_per_token and router_gate are needed too")
        elif self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} is more than the {self.experts} experts")
        if len(self.attention_pattern) > self.layers:
            raise ValueError(f"attention_pattern {self.attention_pattern!r} is longer than the {self.layers} layers")
        if self.local_rope_theta is not None and "L" not in self.attention_pattern:
            raise ValueError("local_rope_theta is given, but attention_pattern has no local layer (L)")
        return self


class LoraConfig(Section):
    """Low-rank adapters (arXiv:2106.09685): the policy's weights stay as they are, W acts as W + scale A B."""

    rank: Int = Field(0, ge=0, description="inner width of A B; 0 trains the whole policy")
    alpha: Float = Field(32.0, gt=0, description="A B is multiplied by alpha / rank")
    targets: tuple[Literal["q", "k", "v", "o", "gate", "up", "down"], ...] = Field(
        ("q", "k", "v", "o", "gate", "up", "down"), description="the projections that get adapters"
    )
    rslora: Bool = Field(False, description="multiply by alpha / sqrt(rank) instead (arXiv:2312.03732)")
    init: str | None = Field(
        None,
        description="adapters to start from: a folder in PEFT's layout, or one on the Hub (`hub:OWNER/NAME[@REVISION]`), which sets rank, alpha, targets and rslora; null draws A and starts from B = 0",
    )

    @model_validator(mode="after")
    def _names_targets_once(self):
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets {list(self.targets)} must name at least one projection, and none twice")
        return self

    @property
    def scale(self) -> float:
        """What A B is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class TokenizerConfig(Section):
    """How text becomes token ids."""

    kind: Literal["sentencepiece", "gguf", "hf"] = Field(
        "sentencepiece",
        description="sentencepiece: built from the task's own text (or read from `path`); gguf: the tokenizer inside the `model.init` file; hf: the tokenizer.json of `path`",
    )
    path: str | None = Field(
        None,
        description="sentencepiece: a .model file to read instead of building one; hf: a folder with a tokenizer.json, that file, or `hub:OWNER/NAME[@REVISION]`",
    )
    eos: str | None = Field(
        None,
        description='hf: the token that ends a completion ("<|im_end|>"), where the files name none or do not agree',
    )
    vocab_size: Int = Field(
        64, gt=8, description="size of a SentencePiece vocabulary built by the project (an upper bound)"
    )
    chat_template: Literal["none", "model", "chatml"] = Field(
        "none",
        description="none: the prompt's text as it is; model: the template in the model's file; chatml: plain ChatML, one user turn and the assistant's header, no system message",
    )


class FieldsConfig(Section):
    """Which fields of a row are what. Texts must be strings; an answer or an id may also be a whole number."""

    prompt: str = Field("prompt", min_length=1, description="field with the prompt")
    answer: str = Field("answer", min_length=1, description="field with the answer that the reward compares with")
    id: str | None = Field(None, min_length=1, description="field with an id, unique in the source; null numbers rows")
    solution: str | None = Field(
        None,
        min_length=1,
        description="field with a right completion, for the warm-up; null where there is none, or where the reward compares texts, so that the answer is one",
    )


# What each kind of source takes besides name, kind, weight, reward, system_prompt and template, with its defaults.
_SOURCE_KEYS: dict[str, dict[str, Any]] = {
    "arithmetic": {"task": "addition", "low": 10, "high": 99, "heldout": 1000, "train": None},
    "sorting": {"low": 0, "high": 9, "shortest": 2, "longest": 6, "heldout": 1000, "train": 10000},
    "copying": {"alphabet": "abcdefghij", "shortest": 1, "longest": 8, "heldout": 1000, "train": 10000},
    "counting": {"alphabet": "abc", "shortest": 1, "longest": 8, "heldout": 1000, "train": 10000},
    "programs": {"low": 1, "high": 9, "shortest": 1, "longest": 3, "heldout": 1000, "train": 10000},
    "reasoning_gym": {"task": None, "options": {}, "heldout": 1000, "train": 10000},
    "jsonl": {"path": None, "heldout_path": None, "heldout": 0, "fields": {}, "answer_after": None},
    "parquet": {"path": None, "heldout_path": None, "heldout": 0, "fields": {}, "answer_after": None},
    "arrayrecord": {"path": None, "heldout_path": None, "heldout": 0, "fields": {}, "answer_after": None},
    "hf": {
        "path": None,
        "split": "train",
        "heldout_split": None,
        "revision": None,
        "heldout": 0,
        "fields": {},
        "answer_after": None,
    },
}
_OWN_KEYS = tuple(dict.fromkeys(key for keys in _SOURCE_KEYS.values() for key in keys))

COMPARING = ("exact", "normalised")
"""The rewards that compare a completion with the answer as texts, so that the answer is a right completion."""


class SourceConfig(Section):
    """One source of prompts. A key that its kind does not take must be left out; docs/data.md has the kinds."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$")] = Field(
        description="names the source in task ids, records and overrides (data.sources.NAME.key=value)"
    )
    kind: Literal[
        "arithmetic",
        "sorting",
        "copying",
        "counting",
        "programs",
        "reasoning_gym",
        "jsonl",
        "parquet",
        "arrayrecord",
        "hf",
    ] = Field(
        description="procedural tasks (arithmetic, sorting, copying, counting, programs, reasoning_gym), or rows of a file (jsonl, parquet, arrayrecord) or of a Hugging Face data set (hf)"
    )
    weight: Float = Field(1.0, gt=0, description="share of the mixture, relative to the other sources' weights")
    reward: str = Field(
        "exact", min_length=1, description="the reward that scores it, see docs/data.md; of kind programs it is code"
    )
    system_prompt: str | None = Field(
        None, min_length=1, description="a system message before the prompt; needs tokenizer.chat_template"
    )
    template: str = Field(
        "{prompt}", description="what the user says; {prompt} stands for the prompt, every other brace for itself"
    )
    task: str | None = Field(
        None,
        description="arithmetic: addition '37+25=', echo_addition '37 + 25 =' answered '37 + 25 = 62', subtraction, multiplication, division, remainder, three_terms; reasoning_gym: one of the allow-list",
    )
    options: dict[str, Any] | None = Field(None, description="reasoning_gym: parameters of its generator")
    low: Int | None = Field(None, ge=0, description="arithmetic, programs: smallest operand; sorting: smallest number")
    high: Int | None = Field(None, ge=0, description="arithmetic, programs: largest operand; sorting: largest number")
    alphabet: str | None = Field(
        None, min_length=1, description="copying, counting: the letters that texts are made of"
    )
    shortest: Int | None = Field(
        None, gt=0, description="sorting, copying, counting, programs: fewest numbers, letters or steps"
    )
    longest: Int | None = Field(
        None, gt=0, description="sorting, copying, counting, programs: most numbers, letters or steps"
    )
    path: str | None = Field(
        None, description="the file with the training rows; hf: a saved data set's folder or OWNER/NAME on the Hub"
    )
    heldout_path: str | None = Field(
        None, description="jsonl, parquet, arrayrecord: a file of its own with the held-out rows"
    )
    split: str | None = Field(None, description="hf: the split with the training rows")
    heldout_split: str | None = Field(None, description="hf: a split of its own with the held-out rows")
    revision: str | None = Field(None, description="hf: branch, tag or commit on the Hub")
    fields: FieldsConfig | None = Field(None, description="which fields of a row are what")
    answer_after: str | None = Field(
        None,
        min_length=1,
        description="the answer is what follows the last of these marks in its field ('####' in GSM8K)",
    )
    heldout: Int | None = Field(
        None,
        ge=0,
        description="prompts kept for evaluation: never among the training prompts; rows are drawn from path where there is no other file or split",
    )
    train: Int | None = Field(
        None, gt=0, description="procedural: training prompts, all different; null is all there are"
    )

    @model_validator(mode="before")
    @classmethod
    def _own_defaults(cls, tree: Any) -> Any:
        """Fill in the defaults of the kind; keys of other kinds stay null."""
        if not isinstance(tree, Mapping) or tree.get("kind") not in _SOURCE_KEYS:
            return tree
        own = _SOURCE_KEYS[tree["kind"]]
        # null stands for the default, except that `train` may be null.
        given = {key: value for key, value in tree.items() if key not in _OWN_KEYS or value is not None}
        scored = {"reward": "code"} if tree["kind"] == "programs" else {}
        return scored | own | given | ({"train": tree["train"]} if "train" in own and "train" in tree else {})

    @model_validator(mode="after")
    def _only_own_keys(self):
        own = _SOURCE_KEYS[self.kind]
        for key in _OWN_KEYS:
            if getattr(self, key) is not None and key not in own:
                raise ValueError(
                    f"{key} {getattr(self, key)!r} is not a key of kind {self.kind}, which takes {', '.join(own)}"
                )
        for key in ("path", "task"):
            if key in own and getattr(self, key) is None:
                raise ValueError(f"{key} is missing, which a source of kind {self.kind} needs")
        for low, high in (("low", "high"), ("shortest", "longest")):
            if getattr(self, low) is not None and getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} = {getattr(self, low)} is above {high} = {getattr(self, high)}")
        if self.alphabet is not None and len(set(self.alphabet)) < len(self.alphabet):
            raise ValueError(f"alphabet {self.alphabet!r} names a letter twice")
        if self.template.count("{prompt}") != 1:
            raise ValueError(f"template {self.template!r} must hold {{prompt}} once")
        if self.kind == "programs" and self.reward in (*COMPARING, "math"):
            raise ValueError(
                f"reward {self.reward} reads texts; programs are run, by reward code or a function of yours"
            )
        if self.fields is not None and self.fields.solution is not None and self.reward in COMPARING:
            raise ValueError(
                f"fields.solution {self.fields.solution!r} is given, but with reward {self.reward} the answer is the "
                "right completion; leave it out"
            )
        if self.heldout and (self.heldout_path or self.heldout_split):
            raise ValueError(
                "heldout draws from the training rows, but the held-out rows have a place of their own; set one of the two"
            )
        return self


class CurriculumConfig(Section):
    """Which training prompts are used, in which order and how often; see docs/data.md."""

    order: Literal["uniform", "easy_to_hard"] = Field(
        "uniform",
        description="uniform: shuffled anew in every epoch; easy_to_hard: by falling pass rate, in every epoch (Tan et al.)",
    )
    pass_rates: str | None = Field(
        None, description="a file that `jaxrl passrate` wrote; easy_to_hard, band and unique_prompts need it"
    )
    band: Literal["easy", "hard"] | tuple[Float, Float] | None = Field(
        None,
        description="only prompts whose pass rate is in this closed interval; easy is [.3, .6] and hard [0, .0625] (IsoCompute)",
    )
    unique_prompts: Int | None = Field(
        None,
        gt=0,
        description="train on so many prompts of each source, drawn from every stratum of pass rates alike; null is all",
    )
    strata: Int = Field(10, gt=0, description="unique_prompts: equal intervals of the pass rate between 0 and 1")
    epochs: Int | None = Field(
        None,
        gt=0,
        description="how often each prompt is used (the tau of data reuse), then the run ends; null is without end",
    )

    @property
    def interval(self) -> tuple[float, float] | None:
        """The band in numbers."""
        if isinstance(self.band, str):
            return {"easy": (0.3, 0.6), "hard": (0.0, 0.0625)}[self.band]
        return self.band

    @model_validator(mode="after")
    def _has_pass_rates(self):
        if self.interval is not None and not 0 <= self.interval[0] <= self.interval[1] <= 1:
            raise ValueError(f"band {list(self.interval)} is not an interval within [0, 1]")
        wanting = {"order": self.order == "easy_to_hard", "band": self.band is not None}
        wanting["unique_prompts"] = self.unique_prompts is not None and self.strata > 1
        if self.pass_rates is None and (needs := [key for key, needed in wanting.items() if needed]):
            raise ValueError(f"{needs[0]} needs pass_rates; make them with `jaxrl passrate`")
        if self.pass_rates is not None and not any(wanting.values()):
            raise ValueError("pass_rates are given, but order, band and unique_prompts do not use them")
        return self


class DataConfig(Section):
    """Where prompts come from, and in which order."""

    sources: tuple[SourceConfig, ...] = Field(
        (SourceConfig(name="addition", kind="arithmetic"),),
        description="the sources, mixed by their weights; each is a section of its own",
    )
    seed: Int = Field(0, ge=0, description="draws problems, held-out splits and the order of every epoch")
    too_long: Literal["refuse", "drop"] = Field(
        "refuse",
        description="a prompt of more than rollout.max_prompt_tokens: ends the run before it begins, or is left out",
    )
    overlap: Literal["refuse", "drop"] = Field(
        "refuse",
        description="a training prompt that is held out too, in whichever source: ends the run before it begins, or is left out",
    )
    curriculum: CurriculumConfig = CurriculumConfig()

    @model_validator(mode="after")
    def _names_sources_once(self):
        names = [source.name for source in self.sources]
        if not names:
            raise ValueError("sources is empty; name at least one")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two sources are named {twice[0]!r}; give each a name of its own")
        return self


class KlConfig(Section):
    """A penalty for leaving a frozen reference policy: the weights RL started from."""

    place: Literal["none", "loss", "reward"] = Field(
        "none",
        description="none: no reference policy is kept; loss: -coefficient x kl beside the objective (GRPO); reward: taken from the reward before advantages (PPO, RLOO, REINFORCE++)",
    )
    estimator: Literal["k1", "k2", "k3"] = Field("k3", description="estimator from sampled tokens; see docs/losses.md")
    coefficient: Float = Field(0.001, ge=0, description="weight of the penalty; 0 in the loss only measures the KL")
    reference_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="dtype of the reference policy's weights, which are sharded like the policy's"
    )


class EntropyConfig(Section):
    """A bonus for the policy's mean token entropy, with a fixed or an adaptive coefficient."""

    coefficient: Float = Field(0.0, ge=0, description="fixed coefficient of the bonus; 0 turns it off")
    target: Float | None = Field(
        None,
        gt=0,
        description="adaptive coefficient instead (Skywork-OR1): from 0 it grows while the entropy of the update before was below this many nats, else shrinks, and applies only up to it; null turns it off",
    )
    step: Float = Field(0.005, gt=0, description="how far the adaptive coefficient moves after an update")
    highest: Float = Field(0.1, gt=0, description="the adaptive coefficient never exceeds this")


class CriticConfig(Section):
    """A value head on the policy's last hidden states: advantages by GAE instead of a comparison within the group."""

    enabled: Bool = Field(False, description="train a value head and take advantages from it")
    gamma: Float = Field(1.0, gt=0, le=1, description="GAE: discount of later rewards")
    lam: Float = Field(1.0, ge=0, le=1, description="GAE: lambda, from one-step errors (0) to whole returns (1)")
    coefficient: Float = Field(
        0.1, gt=0, description="weight of the value loss beside the policy's; its gradient reaches the policy's layers"
    )
    clip: Float | None = Field(
        0.2, gt=0, description="the value loss holds a value within this of its old one (PPO); null turns it off"
    )
    lr: Float = Field(1e-5, ge=0, description="learning rate of the head; warm-up and decay are the optimizer's")


# What each objective takes, with its defaults: the first table of docs/losses.md.
_OBJECTIVE_CONSTANTS: dict[str, dict[str, float | None]] = {
    "reinforce": {},
    "ppo": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "gspo_token": {"clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"ratio_cap": 5.0, "ratio_floor": 0.0},
}
_CONSTANT_NAMES = tuple(dict.fromkeys(name for constants in _OBJECTIVE_CONSTANTS.values() for name in constants))


class RouterConfig(Section):
    """Losses of the routers of a model with experts, beside the objective; see docs/losses.md."""

    balance: Float = Field(
        0.0, ge=0, description="weight of the load-balancing loss, 1 when experts are used evenly; 0 turns it off"
    )
    z: Float = Field(0.0, ge=0, description="weight of the squared logsumexp of the router's logits; 0 turns it off")


class AlgorithmConfig(Section):
    """An algorithm = objective + importance corrections + advantages + aggregation + filters; see docs/losses.md."""

    objective: Literal["reinforce", "ppo", "gspo", "gspo_token", "cispo"] = Field(
        "cispo", description="token objective"
    )
    ratio_cap: Float | None = Field(5.0, gt=0, description="cispo: absolute cap of the importance ratio (not 1+eps)")
    ratio_floor: Float | None = Field(0.0, ge=0, description="cispo: floor of the importance ratio")
    clip_low: Float | None = Field(
        None, ge=0, le=1, description="ppo, gspo: the ratio is clipped below 1 minus this; null is the objective's own"
    )
    clip_high: Float | None = Field(
        None, ge=0, description="ppo, gspo: the ratio is clipped above 1 plus this; null is the objective's own"
    )
    dual_clip: Float | None = Field(
        None, gt=1, description="ppo: where the advantage is negative the ratio counts at most this; null turns it off"
    )
    anchor: Literal["sampler", "old"] | None = Field(
        None,
        description="what the ratio is taken against: the sampler's log-probabilities, or the trainer's at the weights that began the step; null is the objective's own (cispo sampler, else old)",
    )
    importance: dict[str, dict[str, Constant]] = Field(
        {}, description="corrections between trainer and sampler that multiply the objective: name -> its constants"
    )
    updates_per_batch: Int = Field(
        1,
        gt=0,
        description="optimizer updates per step, each on its share of rollout.prompts_per_step; clipping against old means something from 2 on",
    )
    baseline: Literal["none", "group_mean", "leave_one_out"] = Field(
        "group_mean", description="what is subtracted from a reward"
    )
    normalisation: Literal["none", "prompt_std", "batch_std", "global"] = Field(
        "batch_std",
        description="what an advantage is divided by: nothing, the group's standard deviation, or that of all kept advantages of the update; global subtracts their mean first",
    )
    aggregation: Literal["token", "sample", "prompt", "constant", "sequence_sum"] = Field(
        "prompt", description="how token objectives become one number"
    )
    max_tokens: Int | None = Field(
        None, gt=0, description="divisor of aggregation constant; null is rollout.max_new_tokens"
    )
    kl: KlConfig = KlConfig()
    entropy: EntropyConfig = EntropyConfig()
    critic: CriticConfig = CriticConfig()
    router: RouterConfig = RouterConfig()
    zero_variance_filter: Bool = Field(
        True, description="drop groups whose rewards are all equal from the loss and its denominators"
    )
    dynamic_sampling: Int | None = Field(
        None,
        gt=0,
        description="replace prompts whose completions are all right or all wrong by others (DAPO), in a step at most this many times rollout.prompts_per_step; null turns it off",
    )
    overlong_filter: Bool = Field(
        False, description="drop truncated completions from the loss, its denominators and their group's baseline"
    )
    no_positive_resampling: Float | None = Field(
        0.9, gt=0, le=1, description="retire a prompt for good once its pass rate reaches this; null turns it off"
    )

    @model_validator(mode="before")
    @classmethod
    def _own_constants(cls, tree: Any) -> Any:
        """Fill in the constants of the objective that is chosen; those of the others stay null."""
        if not isinstance(tree, Mapping):
            return tree
        own = _OBJECTIVE_CONSTANTS.get(str(tree.get("objective", "cispo")), {})
        given = {name: value for name, value in tree.items() if name not in _CONSTANT_NAMES or value is not None}
        return dict.fromkeys(_CONSTANT_NAMES) | own | given

    @model_validator(mode="after")
    def _only_own_constants(self):
        own = _OBJECTIVE_CONSTANTS[self.objective]
        for name in _CONSTANT_NAMES:
            if getattr(self, name) is not None and name not in own:
                raise ValueError(
                    f"{name} {getattr(self, name)} is not a constant of objective {self.objective}, which takes "
                    f"{', '.join(own) or 'none'}; set algorithm.{name}=null"
                )
        if self.objective == "reinforce" and self.anchor is not None:
            raise ValueError(f"anchor {self.anchor} does nothing for objective reinforce, which has no ratio")
        if self.entropy.target is not None and self.entropy.coefficient:
            raise ValueError(
                "entropy has both a fixed coefficient and a target to adapt it to; set one of them to 0/null"
            )
        return self

    @property
    def constants(self) -> dict[str, float]:
        """The objective's constants that are set."""
        own = {name: getattr(self, name) for name in _OBJECTIVE_CONSTANTS[self.objective]}
        return {name: value for name, value in own.items() if value is not None}

    @property
    def compares(self) -> bool:
        """Whether a completion's advantage or fate depends on its siblings."""
        filters = self.zero_variance_filter or self.dynamic_sampling is not None
        return self.baseline != "none" or self.normalisation == "prompt_std" or filters


class InterruptionConfig(Section):
    """Forced interruption (ScaleRL): a completion that thinks too long is made to answer."""

    enabled: Bool = Field(False, description="give every completion a thinking budget and interrupt it at its end")
    lowest: Int = Field(10000, gt=0, description="smallest thinking budget, in tokens")
    highest: Int = Field(
        12000, gt=0, description="largest thinking budget; budgets are drawn uniformly between the two"
    )
    answer_tokens: Int = Field(2048, gt=0, description="tokens that may follow the end of thinking, forced or not")
    phrase: str = Field(
        "Okay, time is up. Let me stop thinking and formulate a final answer now. </think>",
        description="what the system writes into an interrupted completion; its tokens are not trained on",
    )
    end_of_thinking: str | None = Field(
        "</think>", description="how the policy itself ends its thinking; null if only the budget does"
    )

    @model_validator(mode="after")
    def _is_a_range(self):
        if self.lowest > self.highest:
            raise ValueError(f"lowest {self.lowest} is above highest {self.highest}")
        return self


class RewardModelConfig(Section):
    """A learned reward: a decoder with one output, from a folder in Hugging Face's sequence-classification layout."""

    path: str | None = Field(
        None,
        description="folder of the reward model: config.json, safetensors and its own tokenizer.json; or `hub:OWNER/NAME[@REVISION]`",
    )
    chat_template: Literal["none", "model", "chatml"] = Field(
        "model",
        description="how prompt and completion become its input: model: a user's and an assistant's turn in its own template; chatml: the same in plain ChatML; none: one text behind the other",
    )
    eos: str | None = Field(
        None,
        description="its end-of-sequence token, where its files name none or do not agree (templates may write it)",
    )
    max_tokens: Int | None = Field(
        None,
        gt=0,
        description="longest input it may be given; a longer one is a failed reward, never cut. null: its context, at most 4096",
    )
    rows: Int = Field(8, gt=0, description="completions scored at once; inputs are padded to 32, 64, ... max_tokens")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="dtype of its weights and of what it computes with; its head is float32 always"
    )
    mesh: dict[str, Int] | None = Field(
        None,
        description="its own mesh axes (data, fsdp, expert, tensor), on the last devices; null: it shares the sampler's",
    )


_REWARDS = ("answer", "model", "format", "language")
IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
"""A function of the user's, `package.module:function`."""


class RewardFormatConfig(Section):
    """What the reward `format` asks for."""

    opened_in_prompt: Bool = Field(
        False, description="the prompt's template ends with <think>, so that a completion begins inside its thoughts"
    )
    boxed: Bool = Field(False, description="what follows the thoughts must also hold a \\boxed{...}")


class RewardWorkersConfig(Section):
    """The processes in which `math` and user functions score, each killed when it takes too long."""

    count: Int = Field(4, gt=0, description="processes; rewards that are slow scale with them")
    timeout_s: Float = Field(
        5.0, gt=0, description="seconds one completion may take; then its process is killed and the reward has failed"
    )
    retries: Int = Field(
        1, ge=0, description="times a completion is scored again after a time-out or a crash, before it is dropped"
    )
    memory_mb: Int = Field(1024, ge=256, description="address space of one process, in MiB")
    groups_at_once: Int = Field(4, gt=0, description="groups of completions scored at the same time")


class SandboxConfig(Section):
    """The jails in which the reward `code` and the tool python run programs (docs/sandbox.md); limits are each program's."""

    count: Int = Field(2, gt=0, description="programs that run at once")
    wall_s: Float = Field(
        10.0, gt=0, description="seconds, compiling included; for the tool python rollout.tools.python_wall_s"
    )
    memory_mb: Int = Field(512, ge=64, description="memory of all its processes together, in MiB")
    processes: Int = Field(32, gt=0, description="processes and threads")
    output_kb: Int = Field(1024, gt=0, description="KiB that it may print, and write to standard error")
    disk_mb: Int = Field(64, gt=0, description="MiB of files")


class ToolsConfig(Section):
    """Tools that the policy may call in the middle of a completion; see docs/environments.md."""

    use: tuple[Literal["calculator", "python"], ...] = Field(
        (),
        description="calculator: exact arithmetic; python: programs in the sandbox (rollout.sandbox); none: completions of one turn",
    )
    calculator: tuple[str, str] = Field(
        ("<calculator>", "</calculator>"),
        description="marks before and behind a call of the calculator; the second one ends the turn wherever it is written",
    )
    python: tuple[str, str] = Field(
        ("<python>", "</python>"), description="marks before and behind a program, as rollout.tools.calculator"
    )
    output: tuple[str, str] = Field(
        ("<output>", "</output>"), description="what is put before and behind a tool's answer; either may be empty"
    )
    max_calls: Int = Field(4, gt=0, description="calls answered in one completion; one more cuts it off")
    max_turn_tokens: Int | None = Field(
        None, gt=0, description="tokens that the policy may write in one turn; null: what rollout.max_new_tokens leaves"
    )
    max_output_tokens: Int = Field(128, gt=0, description="tokens of an answer without its marks; a longer one is cut")
    python_wall_s: Float = Field(5.0, gt=0, description="seconds that a program may take")

    @property
    def marks(self) -> dict[str, tuple[str, str]]:
        """The marks of each tool in use."""
        return {name: getattr(self, name) for name in self.use}

    @model_validator(mode="after")
    def _marks_are_told_apart(self):
        if len(set(self.use)) < len(self.use):
            raise ValueError(f"use names a tool twice: {list(self.use)}")
        calls = [mark for pair in self.marks.values() for mark in pair]
        if not all(calls):
            raise ValueError(f"a mark of {self.use[calls.index('') // 2]} is empty; only those of output may be")
        if longest := next((mark for mark in calls if len(mark.encode("utf-8", "replace")) > 256), None):
            raise ValueError(f"the mark {longest[:20]!r}... has more than 256 bytes; shorten it")
        marks = [*calls, *(mark for mark in self.output if mark)] if self.use else []
        for place, mark in enumerate(marks):
            for other in marks[:place] + marks[place + 1 :]:
                if mark in other:
                    raise ValueError(
                        f"the mark {mark!r} is part of the mark {other!r}; choose marks without each other"
                    )
        return self


class RolloutConfig(Section):
    """How prompts become groups of completions, and how far samplers may run ahead."""

    prompts_per_step: Int = Field(32, gt=0, description="prompt groups in one optimizer step")
    group_size: Int = Field(16, gt=0, description="completions per prompt")
    mode: Literal["sync", "ppo_off_policy", "pipeline"] = Field(
        "pipeline",
        description="sync: sample a step's prompts, train, repeat; ppo_off_policy: sample the prompts of max_lag steps with one version, train those steps, repeat; pipeline: sample while training",
    )
    max_lag: Int = Field(
        8,
        ge=0,
        description="k: pipeline trains tokens at most k versions late; ppo_off_policy trains k steps on what one version sampled (at most k - 1 late); sync reads none",
    )
    order: Literal["issue", "finished"] = Field(
        "issue",
        description="which groups the trainer gets: in the order of their issue, or the first finished first as far as the lag bound allows",
    )
    straggler_timeout_s: Float | None = Field(
        None,
        gt=0,
        description="seconds a group may be sampled before rollout.straggler says what becomes of it; null: any",
    )
    straggler: Literal["drop", "train", "reissue"] = Field(
        "reissue",
        description="a group that takes too long: drop it, train its finished siblings, or ask another sampler for the missing ones",
    )
    ready_batches: Int = Field(
        1,
        gt=0,
        description="finished batches that may wait for the trainer; with more waiting the sampler admits no prompt, so that a fast sampler does not make stale samples for stock",
    )
    temperature: Float = Field(
        1.0, gt=0, description="sampling temperature; log-probabilities are taken at it on both sides"
    )
    max_prompt_tokens: Int = Field(16, gt=0, description="longest prompt; a longer one is refused")
    max_new_tokens: Int = Field(8, gt=0, description="longest completion, end-of-sequence token included")
    rewards: dict[str, Float] = Field(
        {"answer": 1.0},
        description="what a reward is the sum of, each with its weight: answer (reward_correct or reward_wrong, by the task's own reward), model (the score of reward_model), format and language (1 or 0); module:function in Python configs; pass rates and evaluation are by the answer always",
    )
    reward_correct: Float = Field(1.0, description="reward of a right answer")
    reward_wrong: Float = Field(-1.0, description="reward of a wrong answer")
    reward_model: RewardModelConfig = RewardModelConfig()
    reward_format: RewardFormatConfig = RewardFormatConfig()
    reward_language: Literal[
        "prompt", "arabic", "cyrillic", "devanagari", "greek", "han", "hangul", "hebrew", "kana", "latin", "thai"
    ] = Field(
        "prompt",
        description="script that the reward `language` asks for in a completion's prose; prompt: the one that most letters of the prompt have",
    )
    reward_workers: RewardWorkersConfig = RewardWorkersConfig()
    sandbox: SandboxConfig = SandboxConfig()
    interruption: InterruptionConfig = InterruptionConfig()
    tools: ToolsConfig = ToolsConfig()
    repetition_limit: Int = Field(
        0, ge=0, description="end a completion after so many consecutive tokens of probability above .99; 0 is never"
    )
    length_penalty: Literal["none", "all", "correct"] = Field(
        "none",
        description="which completions a soft overlong penalty is added to: 0 up to length_limit - length_cache tokens, falling to -1 at length_limit",
    )
    length_limit: Int = Field(20480, gt=0, description="tokens of a completion at which the length penalty reaches -1")
    length_cache: Int = Field(4096, gt=0, description="tokens before length_limit over which the penalty grows")

    @model_validator(mode="after")
    def _known_rewards(self):
        for name in self.rewards:
            if name not in _REWARDS and not IMPORT_PATH.fullmatch(name):
                near = difflib.get_close_matches(name, _REWARDS, n=1)
                hint = f"did you mean {near[0]}?" if near else "it is not module:function either"
                raise ValueError(f"rewards has no part {name!r}, only {', '.join(_REWARDS)}; {hint}")
        if not any(self.rewards.values()):
            raise ValueError("rewards gives no part a weight, so that nothing would train")
        return self


class RemoteConfig(Section):
    """How the trainer and samplers in other processes (`jaxrl sampler`) reach each other; see docs/distributed.md."""

    listen: str | None = Field(
        None,
        description="host:port where samplers register and fetch weights; null: only if sampler.workers are named, on a free port of this machine's own address",
    )
    advertise: str | None = Field(
        None, description="host:port under which samplers reach the trainer; null: where it listens"
    )
    announce: str | None = Field(
        None, description="file into which the trainer writes its address, for `jaxrl sampler --trainer file:PATH`"
    )
    local: Bool | None = Field(
        None, description="whether the trainer's process samples too; null: only if no other process may"
    )
    token_file: str | None = Field(
        None, description="file of the token that both sides show; null: the environment's JAXRL_SERVE_TOKEN, if set"
    )
    tls_cert: str | None = Field(None, description="PEM certificate chain of the trainer's server")
    tls_key: str | None = Field(None, description="PEM private key of that certificate")
    tls_authority: str | None = Field(
        None, description="PEM file of who signed the samplers' certificates; null: connections to them are plain"
    )
    heartbeat_s: Float = Field(2.0, gt=0, description="seconds between two looks at a sampler")
    silence_s: Float = Field(30.0, gt=0, description="seconds without an answer after which a sampler has left the run")
    retry_s: Float = Field(
        2.0, gt=0, description="pause before a lost sampler is tried again; it doubles up to 30 s as long as it is away"
    )
    patience_s: Float = Field(
        1800.0,
        gt=0,
        description="seconds without any sampler after which the run fails, if the trainer does not sample",
    )
    push_timeout_s: Float = Field(
        30.0, gt=0, description="seconds without a byte after which a push of weights is broken off and begun anew"
    )
    push_dtype: Literal["float32", "bfloat16"] | None = Field(
        None,
        description="dtype of weights on their way; null is sampler.dtype. With sampler.int8_weights layers' matrices travel as int8",
    )
    transfer: Bool = Field(
        False,
        description="weights go from device to device by jax.experimental.transfer, which neither authenticates nor encrypts, and in chunks over gRPC only where that fails; on both sides",
    )
    fan_out: Int = Field(
        2, gt=0, description="samplers that fetch a version from one place at a time; those that have it serve others"
    )
    verify_every: Int = Field(
        50,
        gt=0,
        description="pushes between two in which a sampler reads its weights back from its devices and digests them",
    )


class SamplerConfig(Section):
    """The engine that decodes."""

    workers: tuple[str, ...] = Field(
        (),
        description="samplers in other processes that the trainer dials: host:port, file:PATH (one host:port a line, read again and again) or dns:NAME:PORT (every address of the name)",
    )
    remote: RemoteConfig = RemoteConfig()

    slots: Int = Field(256, gt=0, description="sequences decoded at once")
    decode_steps: Int = Field(4, gt=0, description="decode steps per dispatch; weights are swapped between dispatches")
    mesh: dict[str, Int] = Field(
        {"data": 1, "tensor": 1}, description="sampler's mesh axes: data (slots), tensor, expert"
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="dtype of the sampler's copy of the weights; activations have model.compute_dtype"
    )
    kv_dtype: Literal["float32", "bfloat16", "int8"] | None = Field(
        None, description="dtype of the KV cache; null is sampler.dtype. int8 shows in mismatch_max"
    )
    int8_weights: Bool = Field(
        False, description="quantise the sampler's copy of the layers' matrices to int8; it shows in mismatch_max"
    )
    prefill_chunk: Int = Field(
        512, gt=0, description="longer prompts are prefilled in chunks of so many tokens, between which others decode"
    )
    prefill_buckets: tuple[Int, ...] | None = Field(
        None, description="lengths that prompts are padded to, a program each; null: 32, 64, ... and the longest"
    )
    refill_slots: Int | None = Field(
        None,
        gt=0,
        description="slots that must have ended for a dispatch to end early while requests wait; null: a 32nd of the slots",
    )
    recompute_kv: Bool = Field(
        False, description="after a weight swap compute the keys of sequences in flight anew instead of keeping them"
    )


class OptimizerConfig(Section):
    """What an update is made of, and the rate: warm-up, constant, decay."""

    kind: Literal["adamw", "adafactor", "muon"] = Field(
        "adamw",
        description="adamw; adafactor: factored second moments, no momentum (arXiv:1804.04235); muon: orthogonalised momentum for the layers' matrices, adamw for the rest",
    )
    lr: Float = Field(5e-7, ge=0, description="learning rate")
    lr_batch: Int | None = Field(
        None,
        gt=0,
        description="completions per update that lr is meant for: with B of them the rate is lr sqrt(B / lr_batch) (IsoCompute: 1e-6 at 1024); null is lr as it stands",
    )
    warmup_steps: Int = Field(100, ge=0, description="steps over which the rate grows linearly from 0")
    decay_steps: Int = Field(0, ge=0, description="last steps of the run over which the rate falls to lr_floor")
    decay_shape: Literal["linear", "cosine"] = Field("linear", description="how the rate falls")
    lr_floor: Float = Field(0.0, ge=0, le=1, description="share of the rate that decay ends with")
    b1: Float = Field(0.9, ge=0, lt=1, description="adamw: beta 1; muon: beta 1 of adamw for the rest")
    b2: Float = Field(0.95, ge=0, lt=1, description="adamw: beta 2; muon: beta 2 of adamw for the rest")
    eps: Float = Field(1e-15, gt=0, description="adamw: epsilon")
    momentum: Float = Field(0.95, ge=0, lt=1, description="muon: momentum, in Nesterov's form")
    moment_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="dtype of adamw's first moment and of muon's momentum"
    )
    weight_decay: Float = Field(0.01, ge=0, description="decoupled weight decay, on matrices only")
    clip_norm: Float | None = Field(None, gt=0, description="clip gradients to this global norm; null turns it off")
    skip_norm_factor: Float | None = Field(
        None,
        gt=1,
        description="leave out an update whose gradient norm, before clipping, exceeds this many times the mean of the applied ones' (see train/spikes.py: not in the first 20, and at most 9 in a row); null turns it off",
    )


class TrainConfig(Section):
    """The optimizer step."""

    steps: Int = Field(100, gt=0, description="optimizer steps of the run")
    row_length: Int = Field(64, gt=1, description="tokens in one packed row")
    microbatch_rows: Int = Field(
        16, gt=0, description="rows per microbatch; gradients accumulate over as many as the batch needs"
    )
    mesh: dict[str, Int] = Field(
        {"data": 1, "fsdp": 1, "tensor": 1},
        description="trainer's mesh axes: data, fsdp, expert (each splits rows), context (splits a row's tokens), tensor; one of them may be -1",
    )
    share_prompts: Bool = Field(
        False,
        description="compute a prompt once for all its completions in one row, which attend to it; the same loss and gradient with fewer tokens",
    )
    remat: Literal["none", "dots", "dots_no_batch", "full"] = Field(
        "none",
        description="what the backward pass works out again of each layer's forward pass, less memory for more work: none; dots: all but matrix products; dots_no_batch: attention too, but no product with weights; full: everything (experts and attention kernels are worked out again by all but none)",
    )
    unroll_layers: Int = Field(
        1,
        gt=0,
        description="layers compiled as one turn of the loop over them: 1 compiles fastest, and as fast for any depth; more of them save copies, which counts where a model is small",
    )
    gradient_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="dtype in which gradients of several microbatches are added up; a single microbatch's are not kept twice",
    )
    ema: Float | None = Field(
        None,
        gt=0,
        lt=1,
        description="keep an average of what is trained, in float32: after each update ema x average + (1 - ema) x new weights; `--ema` of sample, serve and convert takes it; null keeps none",
    )
    head_chunk: Int | None = Field(
        None,
        gt=0,
        description="tokens whose [vocabulary] logits exist at once, those of all devices together; null: 512 on each device, or fewer where these make more than 96 MiB of float32 logits",
    )


class SftConfig(Section):
    """Supervised warm-up: the same step with advantage 1 on given completions."""

    steps: Int = Field(0, ge=0, description="supervised steps before RL; 0 turns the warm-up off")
    examples_per_step: Int = Field(64, gt=0, description="completions per supervised step")
    lr: Float = Field(1e-3, ge=0, description="learning rate of the warm-up")
    warmup_steps: Int = Field(20, ge=0, description="steps over which that rate grows from 0")


class EvalConfig(Section):
    """Held-out evaluation: mean@n, every sample scored by the task's answer."""

    every: Int = Field(
        25, gt=0, description="optimizer steps between evaluations (step 0 and the last are always evaluated)"
    )
    prompts: Int = Field(
        1000, gt=0, description="held-out prompts used of each source; all of one that holds out fewer beside others"
    )
    samples: Int = Field(4, gt=0, description="completions per prompt: the n of mean@n")
    temperature: Float = Field(1.0, ge=0, description="sampling temperature of evaluation")
    priority: Literal["evaluation", "training"] = Field(
        "evaluation",
        description="whose prompts get free slots first where samplers in other processes evaluate beside their sampling for training",
    )


class CheckpointConfig(Section):
    every: Int = Field(50, gt=0, description="optimizer steps between checkpoints (the last step is always saved)")
    keep: Int = Field(3, gt=0, description="newest checkpoints kept")


class DistributedConfig(Section):
    """Several processes that train together, each on its own devices; see docs/distributed.md."""

    coordinator: str | None = Field(
        None,
        description="null: one process; host:port of process 0; auto: Slurm, Cloud TPU and others that JAX detects. Where this and the next two keys are null, the environment variables JAXRL_COORDINATOR, JAXRL_PROCESSES and JAXRL_PROCESS_ID count",
    )
    processes: Int | None = Field(None, gt=0, description="how many processes there are")
    process_id: Int | None = Field(None, ge=0, description="which of them this is, from 0")
    timeout_s: Float = Field(300, gt=0, description="seconds within which all of them must have come")


class DeviceConfig(Section):
    platform: Literal["default", "cpu"] = Field("default", description="cpu forces the CPU backend")
    cpu_devices: Int = Field(
        2, gt=0, description="virtual devices on the CPU backend: one for the trainer, one for the sampler at least"
    )
    peak_flops: Float | None = Field(
        None,
        gt=0,
        description="FLOP/s that one of the trainer's devices could do, for `mfu`; null: the bfloat16 peak of known TPUs and GPUs, and no mfu elsewhere",
    )
    distributed: DistributedConfig = DistributedConfig()


class RunConfig(Section):
    """Everything a run depends on."""

    recipe: str | None = Field(
        None, description="the published recipe that this is; null where it is none, or one with a part taken out"
    )
    seed: Int = Field(0, ge=0, lt=2**31, description="seed of initialisation and sampling")
    model: ModelConfig = ModelConfig()
    lora: LoraConfig = LoraConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig = DataConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    sampler: SamplerConfig = SamplerConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    sft: SftConfig = SftConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    device: DeviceConfig = DeviceConfig()

    @property
    def adapters(self) -> LoraConfig | None:
        """The section `lora` where it is on."""
        return self.lora if self.lora.rank else None


def load(path: str | Path, overrides: Sequence[str] = (), *, functions: bool = False) -> RunConfig:
    """The validated configuration of a file, its `extends:` parents and dotted overrides (`optimizer.lr=1e-6`).

    A file is YAML or, with the suffix .py, Python that assigns such a mapping to `config`; only Python files may name
    functions to call, unless `functions` says that the file is a run's own record. `extends` is relative to the file.

    `extends=other.yaml` among the overrides puts that file in the place of the one the YAML file extends.
    Raises UserError naming the key, the value, where it stands and the nearest valid name.
    """
    parents = [override for override in overrides if override.startswith("extends=")]
    instead = parents[-1].partition("=")[2] if parents else None
    tree = _read_tree(Path(path), seen=(), instead=instead, functions=functions)
    where = str(path)
    for override in overrides:
        if override in parents:
            continue
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            raise UserError(f"override {override!r} is not of the form section.key=value")
        try:
            value = yaml.load(text, _OneOfEachKey)
        except UserError as error:
            raise UserError(f"override {override!r}: {error}") from None
        except yaml.YAMLError:
            raise UserError(f"override {override!r}: the value is not valid YAML; quote it") from None
        alone: dict[str, Any] = {}
        _put(alone, key.strip().split("."), value, override)
        _refuse_functions(alone, f"override {override!r}")
        _put(tree, key.strip().split("."), value, override)
        where = f"{path} with overrides"
    return validate(tree, where)


def validate(tree: Mapping[str, Any], where: str) -> RunConfig:
    """Build the configuration from plain nested mappings; `where` is named in errors."""
    try:
        config = RunConfig.model_validate(tree)
    except pydantic.ValidationError as error:
        raise UserError("; ".join(_explain(e, where) for e in error.errors()[:3])) from None
    _check_together(config, where)
    return config


def dump(config: RunConfig) -> str:
    """The resolved configuration as YAML; `validate(yaml.safe_load(dump(c)))` is `c` again."""
    return yaml.safe_dump(config.model_dump(), sort_keys=False, width=120)


def describe() -> list[tuple[str, str, str, str]]:
    """Every key as (dotted name, type, default, explanation): the one source of `--help` and `config show`."""
    return list(_describe(RunConfig, ""))


def differences(one: RunConfig, other: RunConfig) -> list[str]:
    """Dotted keys whose values differ, as 'key: one -> other'."""

    def walk(a, b, prefix):
        for key in a:
            compared_whole = ("mesh", "importance", "options", "rewards")
            if isinstance(a[key], dict) and isinstance(b[key], dict) and key not in compared_whole:
                yield from walk(a[key], b[key], f"{prefix}{key}.")
            elif key == "sources" and [s["name"] for s in a[key]] == [s["name"] for s in b[key]]:
                for one, other in zip(a[key], b[key], strict=True):
                    yield from walk(one, other, f"{prefix}{key}.{one['name']}.")
            elif a[key] != b[key]:
                yield f"{prefix}{key}: {a[key]} -> {b[key]}"

    return list(walk(one.model_dump(), other.model_dump(), ""))


def _describe(section: type[Section], prefix: str):
    for name, field in section.model_fields.items():
        if (own := _section(field.annotation)) is not None:
            yield from _describe(own, f"{prefix}{name}.")
            continue
        repeated = next((s for part in get_args(field.annotation) if (s := _section(part))), None)
        if repeated is not None and get_origin(field.annotation) is tuple:
            yield f"{prefix}{name}", "list", "see its keys", field.description or ""
            yield from _describe(repeated, f"{prefix}{name}[].")
        elif repeated is not None:
            yield from _describe(repeated, f"{prefix}{name}.")
        else:
            default = "required" if field.is_required() else str(field.default)
            yield f"{prefix}{name}", _kind(field.annotation), default, field.description or ""


def _section(annotation: Any) -> type[Section] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def _kind(annotation: Any) -> str:
    """A type as people read it: `float | null`, `sampler | old | null`, `dict`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(parts[0])
    if origin is Literal:
        return " | ".join(map(str, parts))
    if origin in (Union, UnionType):
        return " | ".join(map(_kind, parts))
    return "null" if annotation is NoneType else getattr(origin or annotation, "__name__", str(annotation))


class _OneOfEachKey(yaml.SafeLoader):
    """YAML itself lets the last of two equal keys win, and would drop a mesh axis or a whole section in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := sorted({key for key in keys if keys.count(key) > 1}):
            raise UserError(f"key {twice[0]!r} stands twice in one section, line {node.start_mark.line + 1}; keep one")
        return super().construct_mapping(node, deep)


def _read_tree(
    path: Path, seen: tuple[Path, ...], instead: str | None = None, *, functions: bool = False
) -> dict[str, Any]:
    if path.resolve() in seen:
        raise UserError(f"{path} extends itself through {' -> '.join(p.name for p in seen)}")
    try:
        tree = _run_python(path) if path.suffix == ".py" else yaml.load(path.read_text(), _OneOfEachKey)
    except UserError as error:
        raise UserError(f"config file {path}: {error}") from None
    except FileNotFoundError:
        nearby = sorted(p.name for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        hint = f"; {path.parent} has {', '.join(nearby)}" if nearby else ""
        raise UserError(f"config file {path} does not exist{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"config file {path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"config file {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise UserError(f"config file {path} holds a {type(tree).__name__}, not sections of keys")
    if path.suffix != ".py" and not functions:
        _refuse_functions(tree, f"config file {path}")
    parent = tree.pop("extends", None)
    if instead is not None:
        parent = instead
    if parent is None:
        return tree
    if not isinstance(parent, str):
        raise UserError(f"config file {path}: extends is {parent!r}; it wants the path of one other YAML file")
    if parent.endswith(".py") and path.suffix != ".py":
        raise UserError(
            f"config file {path} is YAML and cannot extend {parent}, which is code; name that on the command line"
        )
    return _merge(_read_tree(path.parent / parent, (*seen, path.resolve())), tree)


def _run_python(path: Path) -> Any:
    """What the Python file assigns to `config`; its own errors are shown as they are."""
    if not path.is_file():
        raise FileNotFoundError(path)
    assigned = runpy.run_path(str(path))
    if "config" not in assigned:
        raise UserError("it assigns nothing to `config`")
    return assigned["config"]


def _refuse_functions(tree: Mapping[str, Any], where: str) -> None:
    """Whoever writes a YAML file or an override names values, and runs no code of theirs."""
    rollout, data = tree.get("rollout"), tree.get("data")
    parts = rollout.get("rewards") if isinstance(rollout, Mapping) else None
    sources = data.get("sources") if isinstance(data, Mapping) else None
    named = [*parts] if isinstance(parts, Mapping) else []
    sources = sources.values() if isinstance(sources, Mapping) else sources if isinstance(sources, list) else ()
    named += [source.get("reward") for source in sources if isinstance(source, Mapping)]
    for name in named:
        if ":" in str(name):
            raise UserError(
                f"{where}: the reward {name!r} is a function, which only a Python config may name; see docs/rewards.md"
            )


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _put(tree: dict[str, Any], keys: list[str], value: Any, override: str) -> None:
    for key in keys[:-1]:
        tree = _member(tree, key, override) if isinstance(tree, list) else tree.setdefault(key, {})
        if not isinstance(tree, dict | list):
            raise UserError(f"override {override!r}: {key!r} is a value, not a section")
    if isinstance(tree, list):
        raise UserError(f"override {override!r}: name a key of {keys[-1]!r} too, or give the whole list")
    tree[keys[-1]] = value


def _member(sections: list[Any], key: str, override: str) -> Any:
    """A section of a list, by its name or its number from 0."""
    names = [str(section.get("name")) if isinstance(section, dict) else "" for section in sections]
    if key in names:
        return sections[names.index(key)]
    if key.isdecimal() and int(key) < len(sections):
        return sections[int(key)]
    raise UserError(f"override {override!r}: the list has no {key!r}; it has {', '.join(names)}")


def _explain(error: Any, where: str) -> str:
    location = [str(part) for part in error["loc"]]
    name = ".".join(location)
    if error["type"] == "extra_forbidden":
        known = [key for key, *_ in describe()]
        sections = list(RunConfig.model_fields)
        near = difflib.get_close_matches(name, known + sections, n=2, cutoff=0.5)
        same_leaf = [key for key in known if key.rsplit(".", 1)[-1] == location[-1]]
        hint = " or ".join(dict.fromkeys(same_leaf[:2] + near)) or f"one of the sections {', '.join(sections)}"
        return f"unknown key {name!r} in {where}; did you mean {hint}?"
    if value_lost := next((part for part in location if ":" in part), None):
        return f"{name} in {where}: {value_lost!r} is one word to YAML; put a space after the colon"
    message = error["msg"].removeprefix("Value error, ")
    value = error.get("input")
    shown = "" if isinstance(value, dict) else f" = {value!r}"
    return f"{name}{shown} in {where}: {message[0].lower()}{message[1:]}"


def _check_together(config: RunConfig, where: str) -> None:
    """Refuse values that are fine alone and meaningless together."""
    algorithm, rollout, train, data = config.algorithm, config.rollout, config.train, config.data

    def refuse(message: str) -> None:
        raise UserError(f"{message} (in {where})")

    if config.recipe is not None and config.model.head_dtype != "float32":
        refuse(
            f"model.head_dtype = {config.model.head_dtype} is an ablation, and recipe {config.recipe} has a float32 "
            "head; set recipe=null to run it all the same, or leave the key out"
        )
    if rollout.group_size == 1 and algorithm.compares:
        refuse(
            f"rollout.group_size = 1: baseline {algorithm.baseline}, normalisation {algorithm.normalisation}, "
            f"zero_variance_filter {algorithm.zero_variance_filter} and dynamic_sampling {algorithm.dynamic_sampling} compare a completion with its siblings; "
            "use at least 2"
        )
    if rollout.prompts_per_step % algorithm.updates_per_batch:
        refuse(
            f"rollout.prompts_per_step = {rollout.prompts_per_step} does not divide into "
            f"algorithm.updates_per_batch = {algorithm.updates_per_batch} equal parts"
        )
    if rollout.mode == "ppo_off_policy" and not rollout.max_lag:
        refuse(
            "rollout.mode = ppo_off_policy trains max_lag steps on what one version sampled; max_lag must be above 0"
        )
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    if longest > config.model.max_context and config.model.init is None:
        refuse(
            f"rollout.max_prompt_tokens {rollout.max_prompt_tokens} + rollout.max_new_tokens "
            f"{rollout.max_new_tokens} = {longest} exceeds model.max_context {config.model.max_context}"
        )
    if longest - 1 > train.row_length:
        refuse(
            f"train.row_length = {train.row_length} cannot hold the longest document of "
            f"{longest - 1} tokens (rollout.max_prompt_tokens + rollout.max_new_tokens - 1); raise it"
        )
    if config.optimizer.kind == "muon" and config.adapters is not None:
        refuse(
            "optimizer.kind = muon orthogonalises the layers' matrices, and with lora.rank "
            f"{config.lora.rank} none is trained; use adamw or adafactor, or set lora.rank=0"
        )
    if rollout.tools.use and rollout.interruption.enabled:
        refuse(
            f"rollout.tools.use = {list(rollout.tools.use)} together with rollout.interruption.enabled: a thinking budget "
            "counts one turn; set rollout.interruption.enabled=false, or use no tools"
        )
    for source in data.sources:
        if source.system_prompt is not None and config.tokenizer.chat_template == "none":
            refuse(
                f"data.sources.{source.name}.system_prompt is set, but tokenizer.chat_template = none knows no system "
                "message; choose a template, or write it into data.sources template"
            )
    if rollout.length_cache > rollout.length_limit:
        refuse(
            f"rollout.length_cache = {rollout.length_cache} exceeds rollout.length_limit = {rollout.length_limit}, so "
            "that even an empty completion would be penalised; lower it"
        )
    if ("model" in rollout.rewards) != (rollout.reward_model.path is not None):
        refuse(
            f"rollout.rewards = {rollout.rewards}, but rollout.reward_model.path = {rollout.reward_model.path}; a "
            "reward model needs both a weight, rewards: {model: 1}, and its folder"
        )
    if rollout.reward_correct <= rollout.reward_wrong:
        refuse(
            f"rollout.reward_correct = {rollout.reward_correct} is not above "
            f"rollout.reward_wrong = {rollout.reward_wrong}"
        )
