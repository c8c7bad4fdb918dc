"""From a configuration to the things a run is made of, cheapest checks first and nothing compiled."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
from jaxrl_llm.cli.answers import RewardProcesses, bind_answers, check_answers, reward_processes
from jaxrl_llm.cli.tasks import encoded, heldout_tasks, pools, texts
from jaxrl_llm.cli.tools import make_environment
from jaxrl_llm.config import LoraConfig, ModelConfig, RunConfig, dump
from jaxrl_llm.data.curriculum import Pool
from jaxrl_llm.data.prompts import fingerprint
from jaxrl_llm.data.sources import Source, load_sources
from jaxrl_llm.envs.single_turn import Penalty, SingleTurn
from jaxrl_llm.models.lora import trainable
from jaxrl_llm.models.row_attention import choose_attention
from jaxrl_llm.models.transformer import abstract_params, logical_axes
from jaxrl_llm.rewards.length import soft_overlong
from jaxrl_llm.sampler.engine import PolicyEngine
from jaxrl_llm.sampler.interruption import Interruption
from jaxrl_llm.sharding import check_rows, make_mesh, own_devices, param_shardings, split_devices
from jaxrl_llm.text.chat import encode_trusted
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
    not sample (`samples`), nothing is ever asked of the engine.

    `environment` scores by the tasks' answers, with the help of `reward_processes`, which whoever used it closes.
    """

    pools: list[Pool]
    heldout_tasks: list[PromptTask]
    environment: SingleTurn
    trainer_mesh: Mesh
    reward_mesh: Mesh
    reward_processes: RewardProcesses
    world: World = field(default_factory=World)
    samples: bool = True

    @property
    def train_tasks(self) -> list[PromptTask]:
        """The training prompts of all sources."""
        return [task for pool in self.pools for task in pool.tasks]

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
    sources = load_sources(config.data.sources, seed=config.data.seed, overlap=config.data.overlap)
    config, tokenizer = with_tokenizer(config, sources)
    tasks = encoded(config, tokenizer, sources)
    check_answers(task for source in tasks for task in (*source.train, *source.heldout))
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
    environment, processes = answer_environment(config, tokenizer)
    return Setup(
        config=config,
        tokenizer=tokenizer,
        pools=pools(config, tasks),
        heldout_tasks=heldout_tasks(config, tasks),
        environment=environment,
        trainer_mesh=trainer_mesh,
        reward_mesh=reward_mesh,
        reward_processes=processes,
        engine=_engine(config, tokenizer, sampler_mesh),
        world=world,
        samples=bool(for_sampler),
    )


def assemble_sampler(config: RunConfig, *, top_logprobs: int = 0) -> SamplerSetup:
    """`assemble` for sampling alone: no trainer is checked or built, and the sampler has all devices to itself.

    `top_logprobs` is the engine's.
    """
    config, tokenizer = with_tokenizer(config, None)
    mesh = make_mesh(config.sampler.mesh, own_devices(jax.devices(), config.sampler.mesh, "sampler.mesh"))
    most = min(top_logprobs, config.model.vocab_size)
    return SamplerSetup(config, tokenizer, _engine(config, tokenizer, mesh, top_logprobs=most))


def answer_environment(config: RunConfig, tokenizer: Tokenizer) -> tuple[SingleTurn, RewardProcesses]:
    """What scores by the tasks' answers, and its processes, which whoever used it closes; none is started yet.

    Raises UserError for a reward that does not exist, and for tools that cannot be called.
    """
    names = {source.reward for source in config.data.sources}
    processes = reward_processes(config.rollout, names)
    score = bind_answers(config.rollout, names, processes)
    how = {"score": score, "penalty": _length_penalty(config)}
    return make_environment(config.rollout, tokenizer, processes.python, how), processes


def with_tokenizer(config: RunConfig, sources: Sequence[Source] | None) -> tuple[RunConfig, Tokenizer]:
    """The configuration with the shapes of model and adapters filled in, and the tokenizer that gives them.

    A tokenizer that is made of the training text reads the `sources` for it where they are not given.
    """
    tokenizer = _tokenizer(config, sources)
    model = _model(config.model, tokenizer)
    config = config.model_copy(update={"model": model, "lora": _lora(config.lora, model)})
    if model.vocab_size > tokenizer.vocab_size:
        tokenizer = cast(Tokenizer, WithSpareIds(tokenizer, model.vocab_size))
    _check_context(config)
    return config, tokenizer


def _engine(config: RunConfig, tokenizer: Tokenizer, mesh: Mesh, *, top_logprobs: int = 0) -> PolicyEngine:
    rollout = config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    return PolicyEngine(
        config.model,
        mesh=mesh,
        slots=config.sampler.slots,
        decode_steps=config.sampler.decode_steps,
        # A later turn's prompt is everything so far.
        max_prompt_tokens=longest - 1 if rollout.tools.use else rollout.max_prompt_tokens,
        max_new_tokens=rollout.max_new_tokens,
        context=longest if rollout.tools.use else None,
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
    if "model" in config.rollout.rewards and axes is not None:
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
    """step -> (prompts, gold completions with the end-of-sequence token), of the training problems that have one.

    Raises UserError if none has.
    """
    config, tokenizer = setup.config, setup.tokenizer
    known = [(task.tokens_T, task.gold) for task in setup.train_tasks if task.gold is not None]
    if not known:
        raise UserError(
            "sft.steps needs right completions: a source with reward exact or normalised, of kind programs, or with "
            "fields.solution; set it to 0"
        )
    gold = [np.array([*tokenizer.encode(text), tokenizer.eos_id], np.int32) for _, text in known]

    def draw(step: int) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]]:
        chosen = np.random.default_rng([config.seed, step]).choice(len(gold), config.sft.examples_per_step)
        return [known[i][0] for i in chosen], [gold[i] for i in chosen]

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


def _tokenizer(config: RunConfig, sources: Sequence[Source] | None) -> Tokenizer:
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
    if sources is None:
        sources = load_sources(config.data.sources, seed=config.data.seed, overlap=config.data.overlap)
    return build_sentencepiece(texts(sources), vocab_size=config.tokenizer.vocab_size)


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
