"""The typed configuration of a run: frozen sections, unknown keys refused with the nearest valid name.

Every key is explained once, in its `Field(description=...)`; `jaxrl config show` and `jaxrl train --help` print those
texts. Files are YAML with `extends: other.yaml`; the command line adds dotted overrides such as `optimizer.lr=1e-6`.
"""

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

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


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelConfig(Section):
    """The decoder's shape. With `init` set to a GGUF file the shape is read from the file and must not be given."""

    init: str | None = Field(None, description="weights to start from: a GGUF file or `package:NAME` (a GGUF file inside an installed Python package); none means random")  # fmt: skip
    layers: Int = Field(2, gt=0, description="number of decoder layers")
    d_model: Int = Field(64, gt=0, description="width of the residual stream")
    heads: Int = Field(4, gt=0, description="query heads")
    kv_heads: Int = Field(4, gt=0, description="key/value heads; must divide heads")
    head_dim: Int = Field(16, gt=0, description="width of one head (even, for rotary positions)")
    d_ff: Int = Field(256, gt=0, description="width of the gated feed-forward layer")
    vocab_size: Int = Field(64, gt=1, description="rows of the embedding; set from the tokenizer when it is built by the project")  # fmt: skip
    rope_theta: Float = Field(10000.0, gt=0, description="base of the rotary position frequencies")
    norm_eps: Float = Field(1e-5, gt=0, description="epsilon of the RMS norms")
    tie_embeddings: Bool = Field(True, description="use the embedding as the output head")
    max_context: Int = Field(64, gt=1, description="longest prompt plus completion, in tokens")
    param_dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of the trainer's parameters")
    compute_dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of activations; the head is float32 always")  # fmt: skip

    @model_validator(mode="after")
    def _heads_divide(self):
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary positions need an even width")
        return self


class TokenizerConfig(Section):
    """How text becomes token ids."""

    kind: Literal["sentencepiece", "gguf"] = Field("sentencepiece", description="sentencepiece: built from the task's own text (or read from `path`); gguf: the tokenizer inside the `model.init` file")  # fmt: skip
    path: str | None = Field(None, description="a SentencePiece .model file to read instead of building one")
    vocab_size: Int = Field(64, gt=8, description="size of a SentencePiece vocabulary built by the project (an upper bound)")  # fmt: skip
    chat_template: Literal["none", "chatml"] = Field("none", description="none: the prompt's text as it is; chatml: one user turn and the assistant's header")  # fmt: skip


class DataConfig(Section):
    """Where prompts come from."""

    task: Literal["addition", "echo_addition"] = Field("addition", description="addition: '37+25=' answered '62'; echo_addition: '37 + 25 =' answered '37 + 25 = 62'")  # fmt: skip
    low: Int = Field(10, ge=0, description="smallest operand")
    high: Int = Field(99, description="largest operand")
    heldout_prompts: Int = Field(1000, gt=0, description="prompts kept for evaluation, disjoint from the training prompts")  # fmt: skip
    seed: Int = Field(0, ge=0, description="draws the held-out split and the order of every epoch")


class AlgorithmConfig(Section):
    """An algorithm = token objective + advantage + aggregation + filters."""

    objective: Literal["cispo"] = Field("cispo", description="token objective; see docs/losses.md")
    ratio_cap: Float = Field(5.0, gt=0, description="CISPO: absolute cap of the importance ratio (not 1+eps)")
    advantage: Literal["none", "prompt_std", "batch_std"] = Field("batch_std", description="what a centred reward is divided by: none, the group's standard deviation, or that of all kept advantages in the batch")  # fmt: skip
    aggregation: Literal["token", "sample", "prompt"] = Field("prompt", description="how token objectives become one number; see docs/losses.md")  # fmt: skip
    zero_variance_filter: Bool = Field(True, description="drop groups whose rewards are all equal from the loss and its denominators")  # fmt: skip
    no_positive_resampling: Float | None = Field(0.9, gt=0, le=1, description="retire a prompt for good once its pass rate reaches this; null turns it off")  # fmt: skip


class RolloutConfig(Section):
    """How prompts become groups of completions, and how far samplers may run ahead."""

    prompts_per_step: Int = Field(32, gt=0, description="prompt groups in one optimizer step")
    group_size: Int = Field(16, gt=0, description="completions per prompt")
    max_lag: Int = Field(8, ge=0, description="PipelineRL-k: trained tokens are at most k versions old")
    temperature: Float = Field(1.0, gt=0, description="sampling temperature; log-probabilities are taken at it on both sides")  # fmt: skip
    max_prompt_tokens: Int = Field(16, gt=0, description="longest prompt; a longer one is refused")
    max_new_tokens: Int = Field(8, gt=0, description="longest completion, end-of-sequence token included")
    reward_correct: Float = Field(1.0, description="reward of a right answer")
    reward_wrong: Float = Field(-1.0, description="reward of a wrong answer")


class SamplerConfig(Section):
    """The engine that decodes."""

    slots: Int = Field(256, gt=0, description="sequences decoded at once")
    decode_steps: Int = Field(4, gt=0, description="decode steps per dispatch; weights are swapped between dispatches")
    mesh: dict[str, Int] = Field({"data": 1, "tensor": 1}, description="sampler's mesh axes: data (slots), tensor")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of the sampler's copy of the weights and of its KV cache")  # fmt: skip


class OptimizerConfig(Section):
    """AdamW with a constant rate after a linear warm-up."""

    lr: Float = Field(5e-7, ge=0, description="learning rate")
    warmup_steps: Int = Field(100, ge=0, description="steps over which the rate grows linearly from 0")
    decay_steps: Int = Field(0, ge=0, description="last steps of the run over which the rate falls linearly to 0")
    b1: Float = Field(0.9, ge=0, lt=1, description="AdamW beta 1")
    b2: Float = Field(0.95, ge=0, lt=1, description="AdamW beta 2")
    eps: Float = Field(1e-15, gt=0, description="AdamW epsilon")
    weight_decay: Float = Field(0.01, ge=0, description="AdamW weight decay, on matrices only")
    clip_norm: Float | None = Field(None, gt=0, description="clip gradients to this global norm; null turns it off")


class TrainConfig(Section):
    """The optimizer step."""

    steps: Int = Field(100, gt=0, description="optimizer steps of the run")
    row_length: Int = Field(64, gt=1, description="tokens in one packed row")
    microbatch_rows: Int = Field(16, gt=0, description="rows per microbatch; gradients accumulate over as many as the batch needs")  # fmt: skip
    mesh: dict[str, Int] = Field({"data": 1, "fsdp": 1, "tensor": 1}, description="trainer's mesh axes: data, fsdp, tensor; one of them may be -1")  # fmt: skip
    remat: Bool = Field(False, description="recompute each layer's activations in the backward pass")
    head_chunk: Int = Field(512, gt=0, description="tokens whose [vocabulary] logits exist at once")


class SftConfig(Section):
    """Supervised warm-up: the same step with advantage 1 on given completions."""

    steps: Int = Field(0, ge=0, description="supervised steps before RL; 0 turns the warm-up off")
    examples_per_step: Int = Field(64, gt=0, description="completions per supervised step")
    lr: Float = Field(1e-3, ge=0, description="learning rate of the warm-up")
    warmup_steps: Int = Field(20, ge=0, description="steps over which that rate grows from 0")


class EvalConfig(Section):
    """Held-out evaluation: mean@n, every sample scored by the same reward."""

    every: Int = Field(25, gt=0, description="optimizer steps between evaluations (step 0 and the last are always evaluated)")  # fmt: skip
    prompts: Int = Field(1000, gt=0, description="held-out prompts used")
    samples: Int = Field(4, gt=0, description="completions per prompt: the n of mean@n")
    temperature: Float = Field(1.0, ge=0, description="sampling temperature of evaluation")


class CheckpointConfig(Section):
    every: Int = Field(50, gt=0, description="optimizer steps between checkpoints (the last step is always saved)")
    keep: Int = Field(3, gt=0, description="newest checkpoints kept")


class DeviceConfig(Section):
    platform: Literal["default", "cpu"] = Field("default", description="cpu forces the CPU backend")
    cpu_devices: Int = Field(2, gt=0, description="virtual devices on the CPU backend: one for the trainer, one for the sampler at least")  # fmt: skip


class RunConfig(Section):
    """Everything a run depends on."""

    seed: Int = Field(0, ge=0, lt=2**31, description="seed of initialisation and sampling")
    model: ModelConfig = ModelConfig()
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
