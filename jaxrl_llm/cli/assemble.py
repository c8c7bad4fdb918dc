"""From a configuration to the things a run is made of, cheapest checks first and nothing compiled."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.checkpoints.gguf import read_gguf_metadata, resolve_init
from jaxrl_llm.checkpoints.hf_config import SHAPE_KEYS
from jaxrl_llm.checkpoints.hub import hub_snapshot, is_hub
from jaxrl_llm.checkpoints.initial import initial_shape, initial_weights
from jaxrl_llm.checkpoints.peft import adapter_folder, read_peft
from jaxrl_llm.cli.algorithm import check_algorithm, check_router
from jaxrl_llm.config import LoraConfig, ModelConfig, RunConfig, dump
from jaxrl_llm.data.arithmetic import Problem, split_problems
from jaxrl_llm.data.prompts import fingerprint
from jaxrl_llm.envs.single_turn import Penalty, SingleTurn
from jaxrl_llm.models.lora import trainable
from jaxrl_llm.models.row_attention import choose_attention
from jaxrl_llm.models.transformer import abstract_params, logical_axes
from jaxrl_llm.rewards.exact import exact_match
from jaxrl_llm.rewards.length import soft_overlong
from jaxrl_llm.sampler.engine import PolicyEngine
from jaxrl_llm.sampler.interruption import Interruption
from jaxrl_llm.sharding import check_rows, make_mesh, own_devices, param_shardings, split_devices
from jaxrl_llm.text.chat import encode_trusted, render_prompt_ids
from jaxrl_llm.text.gguf_tokenizer import tokenizer_from_gguf
from jaxrl_llm.text.hf_tokenizer import load_hf
from jaxrl_llm.text.sentencepiece import build_sentencepiece, load_sentencepiece
from jaxrl_llm.text.tokenizer import Tokenizer, WithSpareIds
from jaxrl_llm.train.optimizer import for_batch
from jaxrl_llm.types import Params, PromptTask, UserError
from jaxrl_llm.world import World


@dataclass(frozen=True)
class SamplerSetup:
    """What sampling needs: the checked configuration with the model's shape filled in, the tokenizer and the sampler's
    engine, which compiles nothing until it is used."""

    config: RunConfig
    tokenizer: Tokenizer
    engine: PolicyEngine

    @property
    def fingerprints(self) -> dict[str, str]:
        """What a checkpoint must have been made with to be sampled."""
        return {"tokenizer": self.tokenizer.fingerprint, "lora": _lora_words(self.config.adapters)}


@dataclass(frozen=True)
class Setup(SamplerSetup):
    """A checked run: besides, the data in tokens, the trainer's mesh and the processes that share it. Where these do
    not sample (`samples`), nothing is ever asked of the engine."""

    train_tasks: list[PromptTask]
    heldout_tasks: list[PromptTask]
    environment: SingleTurn
    trainer_mesh: Mesh
    reward_mesh: Mesh
    world: World = field(default_factory=World)
    samples: bool = True

    @property
    def fingerprints(self) -> dict[str, str]:
        """What a checkpoint must have been made with to be gone on from."""
        return super().fingerprints | {
            "config": hashlib.sha256(dump(self.config).encode()).hexdigest(),
            "data": fingerprint(self.train_tasks + self.heldout_tasks),
        }


def assemble(
    config: RunConfig,
    devices: Sequence[jax.Device] | None = None,
    world: World | None = None,
    *,
    samples: bool = True,
) -> Setup:
    """Raises UserError for whatever in the configuration cannot work on this machine's files and devices.

    Other `devices` than this machine's may be given, to compile for. Where `samples` is False, as in several processes
    always, the trainer has all devices to itself.
    """
    world = world or World()
    check_algorithm(config)
    config, tokenizer, train, heldout = _with_tokenizer(config)
    completions = config.rollout.prompts_per_step * config.rollout.group_size // config.algorithm.updates_per_batch
    config = config.model_copy(update={"optimizer": for_batch(config.optimizer, completions)})
    check_router(config)
    for_trainer, for_sampler, for_rewards = _split(
        config, jax.devices() if devices is None else devices, world, samples
    )
    trainer_mesh = make_mesh(config.train.mesh, for_trainer)
    sampler_mesh = make_mesh(config.sampler.mesh, for_sampler) if for_sampler else make_mesh({}, for_trainer[:1])
    reward_mesh = make_mesh(config.rollout.reward_model.mesh or {}, for_rewards) if for_rewards else sampler_mesh
    choose_attention(config.model, trainer_mesh, share_prompts=config.train.share_prompts)
    param_shardings(trainer_mesh, logical_axes(config.model), abstract_params(config.model), whose="train.mesh")
    shape = (config.train.microbatch_rows, config.train.row_length)
    check_rows(trainer_mesh, shape, "train.microbatch_rows", "train.row_length")
    rollout = config.rollout
    return Setup(
        config=config,
        tokenizer=tokenizer,
        train_tasks=_tasks(config, tokenizer, train),
        heldout_tasks=_tasks(config, tokenizer, heldout)[: config.eval.prompts],
        environment=SingleTurn(
            decode=tokenizer.decode,
            score=partial(exact_match, correct=rollout.reward_correct, wrong=rollout.reward_wrong),
            penalty=_length_penalty(config),
        ),
        trainer_mesh=trainer_mesh,
        reward_mesh=reward_mesh,
        engine=_engine(config, tokenizer, sampler_mesh),
        world=world,
        samples=bool(for_sampler),
    )


def assemble_sampler(config: RunConfig, *, top_logprobs: int = 0) -> SamplerSetup:
    """`assemble` for sampling alone: no trainer is checked or built, and the sampler has all devices to itself.

    `top_logprobs` is the engine's.
    """
    config, tokenizer, _, _ = _with_tokenizer(config)
    mesh = make_mesh(config.sampler.mesh, own_devices(jax.devices(), config.sampler.mesh, "sampler.mesh"))
    most = min(top_logprobs, config.model.vocab_size)
    return SamplerSetup(config, tokenizer, _engine(config, tokenizer, mesh, top_logprobs=most))


def _with_tokenizer(config: RunConfig) -> tuple[RunConfig, Tokenizer, list[Problem], list[Problem]]:
    """The configuration with the shapes of model and adapters filled in, the tokenizer that gives them, train and
    held-out problems."""
    data = config.data
    train, heldout = split_problems(
        data.task, low=data.low, high=data.high, heldout=data.heldout_prompts, seed=data.seed
    )
    tokenizer = _tokenizer(config, train)
    model = _model(config.model, tokenizer)
    config = config.model_copy(update={"model": model, "lora": _lora(config.lora, model)})
    if model.vocab_size > tokenizer.vocab_size:
        tokenizer = cast(Tokenizer, WithSpareIds(tokenizer, model.vocab_size))
    _check_context(config)
    return config, tokenizer, train, heldout


def _engine(config: RunConfig, tokenizer: Tokenizer, mesh: Mesh, *, top_logprobs: int = 0) -> PolicyEngine:
    return PolicyEngine(
        config.model,
        mesh=mesh,
        slots=config.sampler.slots,
        decode_steps=config.sampler.decode_steps,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        max_new_tokens=config.rollout.max_new_tokens,
        eos_id=tokenizer.eos_id,
        dtype=config.sampler.dtype,
        kv_dtype=config.sampler.kv_dtype,
        int8_weights=config.sampler.int8_weights,
        prefill_buckets=config.sampler.prefill_buckets,
        prefill_chunk=config.sampler.prefill_chunk,
        interruption=_interruption(config, tokenizer),
        top_logprobs=top_logprobs,
    )


def _split(
    config: RunConfig, devices: Sequence[jax.Device], world: World, samples: bool
) -> tuple[list[jax.Device], list[jax.Device], list[jax.Device]]:
    """The devices of trainer, sampler and a reward model's own mesh: those are the last ones."""
    if world.count > 1:
        return list(devices), [], []
    axes, count = config.rollout.reward_model.mesh, 0
    if config.rollout.reward == "model" and axes is not None:
        count = math.prod(axes.values())
        if min(axes.values(), default=1) < 1 or count >= len(devices):
            raise UserError(
                f"rollout.reward_model.mesh = {axes} leaves no device to trainer and sampler, or has a size below 1; "
                f"there are {len(devices)} devices; make it smaller, or null to share the sampler's"
            )
    rest, rewards = list(devices[: len(devices) - count]), list(devices[len(devices) - count :])
    if not samples:
        return own_devices(rest, config.train.mesh, "train.mesh"), [], rewards
    return *split_devices(rest, config.train.mesh, config.sampler.mesh), rewards


def _interruption(config: RunConfig, tokenizer: Tokenizer) -> Interruption | None:
    how, rollout = config.rollout.interruption, config.rollout
    if not how.enabled:
        return None
    phrase = tuple(encode_trusted(tokenizer, how.phrase))
    if (needed := how.highest + len(phrase) + how.answer_tokens) > rollout.max_new_tokens:
        raise UserError(
            f"rollout.interruption: highest {how.highest} + the phrase's {len(phrase)} tokens + answer_tokens "
            f"{how.answer_tokens} = {needed} exceeds rollout.max_new_tokens = {rollout.max_new_tokens}; lower one of "
            "them, raise the limit, or set rollout.interruption.enabled=false"
        )
    return Interruption(phrase, tuple(encode_trusted(tokenizer, how.end_of_thinking or "")))


def initial_params(setup: SamplerSetup) -> Params | None:
    """The weights `model.init` names, or None for a random start: on the trainer's mesh, or the sampler's where there
    is no trainer, or as numpy arrays."""
    model = setup.config.model
    if model.init is None:
        return None
    mesh = setup.trainer_mesh if isinstance(setup, Setup) else setup.engine.mesh
    places = param_shardings(mesh, logical_axes(model), abstract_params(model))
    return initial_weights(model.init, model.param_dtype, places)


def supervised_examples(
    setup: Setup,
) -> Callable[[int], tuple[Sequence[np.ndarray], Sequence[np.ndarray]]]:
    """step -> (prompts, gold completions with the end-of-sequence token) drawn from the training problems."""
    config, tokenizer = setup.config, setup.tokenizer
    gold = [np.array([*tokenizer.encode(task.answer), tokenizer.eos_id], np.int32) for task in setup.train_tasks]

    def draw(step: int) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]]:
        chosen = np.random.default_rng([config.seed, step]).choice(len(gold), config.sft.examples_per_step)
        return [setup.train_tasks[i].tokens_T for i in chosen], [gold[i] for i in chosen]

    return draw


def _length_penalty(config: RunConfig) -> Penalty | None:
    rollout = config.rollout
    if rollout.length_penalty == "none":
        return None
    only_correct = rollout.length_penalty == "correct"

    def penalty(tokens: int, correct: bool) -> float:
        if only_correct and not correct:
            return 0.0
        return soft_overlong(tokens, limit=rollout.length_limit, cache=rollout.length_cache)

    return penalty


def _tokenizer(config: RunConfig, problems: Sequence[Problem]) -> Tokenizer:
    if config.tokenizer.kind == "gguf":
        if config.model.init is None:
            raise UserError("tokenizer.kind = gguf reads the tokenizer of model.init, which is not set")
        path = resolve_init(config.model.init)
        return tokenizer_from_gguf(read_gguf_metadata(path), source=str(path))
    if config.tokenizer.kind == "hf":
        if config.tokenizer.path is None:
            raise UserError(
                "tokenizer.kind = hf reads tokenizer.path, which is not set; give a folder with a tokenizer.json"
            )
        return load_hf(_tokenizer_path(config.tokenizer.path), eos=config.tokenizer.eos)
    if config.tokenizer.path is not None:
        return load_sentencepiece(config.tokenizer.path)
    return build_sentencepiece(
        [problem.prompt + problem.answer for problem in problems], vocab_size=config.tokenizer.vocab_size
    )


def _tokenizer_path(path: str) -> str | Path:
    """A local path; of `hub:OWNER/NAME[@REVISION]` the folder with the repository's tokenizer."""
    return hub_snapshot(path, weights=False) if is_hub(path) else path


def _model(model: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """The model's shape from where it is decided; a key that says otherwise is refused, not overruled."""
    shape: dict[str, Any] = {"vocab_size": tokenizer.vocab_size}
    source = "the tokenizer"
    if model.init is not None:
        shape, source = initial_shape(model.init), model.init
        if shape["rope_scaling"].kind == "dynamic" and "max_context" in model.model_fields_set:
            shape["max_context"] = model.max_context  # dynamic scaling is for contexts beyond the checkpoint's own
        if tokenizer.vocab_size > shape["vocab_size"]:
            raise UserError(f"the tokenizer has {tokenizer.vocab_size} ids, {source} only {shape['vocab_size']} rows")
    for key in SHAPE_KEYS:
        if key in model.model_fields_set and key in shape and getattr(model, key) != shape[key]:
            raise UserError(f"model.{key} = {getattr(model, key)}, but {source} has {shape[key]}; leave the key out")
    return model.model_copy(update=shape)


def _lora(lora: LoraConfig, model: ModelConfig) -> LoraConfig:
    """The adapters' settings from where they are decided, checked against the model."""
    if lora.init is not None:
        told, _ = read_peft(adapter_folder(lora.init), model)
        for key in ("rank", "alpha", "targets", "rslora"):
            ours, theirs = getattr(lora, key), getattr(told, key)
            if key in lora.model_fields_set and (set(ours) != set(theirs) if key == "targets" else ours != theirs):
                raise UserError(f"lora.{key} = {ours}, but {lora.init} has {theirs}; leave the key out")
        lora = told.model_copy(update={"init": lora.init})
    if lora.rank:
        trainable(model, lora)
    return lora


def _lora_words(lora: LoraConfig | None) -> str:
    """What a checkpoint's adapters mean."""
    return "none" if lora is None else f"rank {lora.rank}, scale {lora.scale}, {' '.join(sorted(lora.targets))}"


def _check_context(config: RunConfig) -> None:
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    if longest > config.model.max_context:
        raise UserError(
            f"rollout.max_prompt_tokens + rollout.max_new_tokens = {longest} exceeds the model's context of "
            f"{config.model.max_context} tokens"
        )


def _tasks(config: RunConfig, tokenizer: Tokenizer, problems: Sequence[Problem]) -> list[PromptTask]:
    """Problems in tokens; refuses a prompt that does not fit, and an answer no completion could hold."""
    rollout = config.rollout
    tasks = []
    for problem in problems:
        ids = render_prompt_ids(tokenizer, problem.prompt, config.tokenizer.chat_template)
        if len(ids) > rollout.max_prompt_tokens:
            raise UserError(
                f"prompt {problem.prompt!r} ({problem.task_id}) has {len(ids)} tokens, more than "
                f"rollout.max_prompt_tokens = {rollout.max_prompt_tokens}; raise it"
            )
        needed = len(tokenizer.encode(problem.answer)) + 1
        if needed > rollout.max_new_tokens:
            raise UserError(
                f"answer {problem.answer!r} ({problem.task_id}) needs {needed} tokens with its end, more than "
                f"rollout.max_new_tokens = {rollout.max_new_tokens}; raise it"
            )
        tasks.append(PromptTask(problem.task_id, np.array(ids, np.int32), problem.prompt, problem.answer))
    return tasks
