"""What trains: the weighted parts of a run's rewards, checked before anything is written."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from jaxrl_llm.checkpoints.hf import read_hf_params
from jaxrl_llm.checkpoints.hf_reward import RewardFolder, open_hf_reward
from jaxrl_llm.checkpoints.hub import hub_snapshot, is_hub
from jaxrl_llm.cli.assemble import Setup
from jaxrl_llm.config import ModelConfig
from jaxrl_llm.envs.single_turn import SingleTurn
from jaxrl_llm.models.reward_model import SequenceScorer, reward_shardings
from jaxrl_llm.rewards.combine import weighted
from jaxrl_llm.rewards.format import format_reward
from jaxrl_llm.rewards.language import language_reward
from jaxrl_llm.rewards.learned import learned_rewards
from jaxrl_llm.rewards.pooled import user_part
from jaxrl_llm.rewards.protocol import RewardFunction
from jaxrl_llm.sharding import check_divides, check_whole_rows
from jaxrl_llm.text.chat import ChatTemplate, render_chat, render_prompt_ids
from jaxrl_llm.text.hf_tokenizer import load_hf
from jaxrl_llm.text.tokenizer import Tokenizer
from jaxrl_llm.types import UserError

_LONGEST = 4096  # tokens, where neither the configuration nor the model's context says less


@dataclass(frozen=True)
class OpenedRewardModel:
    """A checked reward model; its weights are still in their folder."""

    setup: Setup
    source: RewardFolder
    model: ModelConfig
    tokenizer: Tokenizer
    max_tokens: int

    def encode(self, prompt: str, completion: str) -> list[int]:
        """The model's input. Raises UserError as `render_chat` does."""
        return scored_ids(self.tokenizer, prompt, completion, self.setup.config.rollout.reward_model.chat_template)

    def scorer(self) -> SequenceScorer:
        """Reads the weights straight to their devices. Raises UserError naming a tensor that is damaged."""
        how, mesh = self.setup.config.rollout.reward_model, self.setup.reward_mesh
        params = read_hf_params(self.source.folder, how.dtype, reward_shardings(self.model, mesh))
        return SequenceScorer(
            self.model, params, mesh=mesh, rows=how.rows, max_tokens=self.max_tokens, pad_id=self.source.pad_id
        )

    def rewards(self) -> RewardFunction:
        """The model's scores, one group at a time whoever asks."""
        score, lock = self.scorer(), threading.Lock()

        def one_at_a_time(sequences: Sequence[Sequence[int]]) -> np.ndarray:
            with lock:
                return score(sequences)

        return partial(learned_rewards, encode=self.encode, score=one_at_a_time, max_tokens=self.max_tokens)


@dataclass(frozen=True)
class OpenedRewards:
    """The checked parts of a run's rewards."""

    setup: Setup
    model: OpenedRewardModel | None

    def environment(self) -> SingleTurn:
        """Episodes whose rewards are the weighted parts; what is correct is still said by the task's answer."""
        weights = self.setup.config.rollout.rewards
        others = [(self._part(name), weight) for name, weight in weights.items() if name != "answer"]
        environment = self.setup.environment
        return environment.scored_by(weighted(environment.score, weights.get("answer", 0.0), others))

    def _part(self, name: str) -> RewardFunction:
        rollout = self.setup.config.rollout
        if name == "format":
            return partial(format_reward, **rollout.reward_format.model_dump())
        if name == "language":
            return partial(language_reward, script=rollout.reward_language)
        if name == "model":
            assert self.model is not None
            return self.model.rewards()
        return user_part(self.setup.reward_processes.workers, name)


def open_rewards(setup: Setup) -> OpenedRewards:
    """Checks what the rewards need, and starts their processes. Raises UserError for whatever does not fit."""
    model = open_reward_model(setup) if "model" in setup.config.rollout.rewards else None
    setup.reward_processes.start()
    return OpenedRewards(setup, model)


def scored_ids(tokenizer: Tokenizer, prompt: str, completion: str, template: ChatTemplate) -> list[int]:
    """Token ids of a prompt and a completion as a reward model reads them; special tokens come from the template alone.

    Raises UserError as `render_chat` does, and for an input without a token.
    """
    if template == "none":
        ids = render_prompt_ids(tokenizer, prompt + completion, "none")
    else:
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        ids = render_chat(tokenizer, turns, template=template, add_generation_prompt=False)
    if not ids:
        raise UserError("it has no tokens")
    return ids


def open_reward_model(setup: Setup) -> OpenedRewardModel:
    """Checks folder, tokenizer, mesh and lengths. Raises UserError for whatever does not fit."""
    how = setup.config.rollout.reward_model
    try:
        path = str(how.path)
        path = str(hub_snapshot(path)) if is_hub(path) else path
        source = open_hf_reward(path)
        tokenizer = load_hf(path, eos=how.eos)
    except UserError as error:
        raise UserError(f"rollout.reward_model: {error}") from None
    model = source.folder.model.model_copy(update={"param_dtype": how.dtype, "compute_dtype": how.dtype})
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"rollout.reward_model: its tokenizer has {tokenizer.vocab_size} ids, its embedding only "
            f"{model.vocab_size} rows"
        )
    if how.max_tokens is not None and how.max_tokens > model.max_context:
        raise UserError(
            f"rollout.reward_model.max_tokens = {how.max_tokens} exceeds the model's context of {model.max_context} "
            "tokens; lower it"
        )
    check_whole_rows(setup.reward_mesh, "rollout.reward_model.mesh")
    check_divides(setup.reward_mesh, ("batch", None), (how.rows, 1), "rollout.reward_model.rows")
    try:
        reward_shardings(model, setup.reward_mesh)
    except UserError as error:
        whose = "sampler.mesh, which rollout.reward_model shares" if how.mesh is None else "rollout.reward_model.mesh"
        raise UserError(f"{whose}: {error}") from None
    max_tokens = how.max_tokens or min(model.max_context, _LONGEST)
    opened = OpenedRewardModel(setup, source, model, tokenizer, max_tokens)
    task = setup.train_tasks[0]
    try:
        opened.encode(task.prompt, task.answer)
    except UserError as error:
        raise UserError(
            f"rollout.reward_model cannot be given the prompt {task.prompt!r} ({task.task_id}): {error}; see "
            "rollout.reward_model.chat_template"
        ) from None
    return opened
