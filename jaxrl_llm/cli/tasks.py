"""From a configuration and a tokenizer to the tasks of a run."""

from collections.abc import Sequence

from jaxrl_llm.config import DataConfig, RunConfig
from jaxrl_llm.data.curriculum import (
    Pool,
    check_rated,
    easy_to_hard,
    read_pass_rates,
    stratified_subset,
    within_band,
)
from jaxrl_llm.data.prompts import PromptMixture, Prompts, PromptStream
from jaxrl_llm.data.sources import Source, SourceTasks, encode_source
from jaxrl_llm.text.chat import render_prompt_ids
from jaxrl_llm.text.tokenizer import Tokenizer
from jaxrl_llm.types import PromptTask, UserError


def texts(sources: Sequence[Source]) -> list[str]:
    """The training text that a tokenizer is made of: of each problem the prompt and the right completion, or the answer
    where none is known."""
    return [
        source.user_text(problem) + (source.gold(problem) or problem.answer)
        for source in sources
        for problem in source.split.train
    ]


def encoded(config: RunConfig, tokenizer: Tokenizer, sources: Sequence[Source]) -> list[SourceTasks]:
    """Every source in tokens. Raises UserError as `encode_source` does."""
    rollout, template = config.rollout, config.tokenizer.chat_template
    return [
        encode_source(
            source,
            lambda text, system: render_prompt_ids(tokenizer, text, template, system),
            tokenizer.encode,
            max_prompt_tokens=rollout.max_prompt_tokens,
            max_new_tokens=rollout.max_new_tokens,
            too_long=config.data.too_long,
        )
        for source in sources
    ]


def pools(config: RunConfig, tasks: Sequence[SourceTasks]) -> list[Pool]:
    """What the curriculum makes of the training prompts.

    Raises UserError for prompts without a pass rate, and where nothing is left of a source.
    """
    how, seed = config.data.curriculum, config.data.seed
    rates = read_pass_rates(how.pass_rates) if how.pass_rates is not None else {}
    found = []
    for source in tasks:
        chosen = source.train
        if how.pass_rates is not None:
            check_rated(chosen, rates, how.pass_rates)
        if how.interval is not None:
            chosen = within_band(chosen, rates, how.interval)
        if not chosen:
            raise UserError(
                f"data.curriculum.band = {how.band} leaves no training prompt of source {source.name}; widen it"
            )
        if how.unique_prompts is not None:
            chosen = stratified_subset(chosen, rates, how.unique_prompts, strata=how.strata, seed=seed)
        if how.order == "easy_to_hard":
            chosen = easy_to_hard(chosen, rates, seed=seed)
        found.append(Pool(source.name, source.weight, chosen))
    return found


def heldout_tasks(config: RunConfig, tasks: Sequence[SourceTasks]) -> list[PromptTask]:
    """The held-out prompts that evaluation uses. Raises UserError if no source holds out as many as it asks for."""
    prompts = config.eval.prompts
    if prompts > (most := max(len(source.heldout) for source in tasks)):
        raise UserError(
            f"eval.prompts = {prompts} exceeds the {most} held-out prompts that there are; lower it, or hold out more "
            "(data.sources heldout)"
        )
    return [task for source in tasks for task in source.heldout[:prompts]]


def prompt_stream(pools: Sequence[Pool], how: DataConfig) -> Prompts:
    """The training prompts as a run meets them."""
    shuffle = how.curriculum.order == "uniform"
    streams = [
        PromptStream(pool.tasks, seed=how.seed + place, shuffle=shuffle, epochs=how.curriculum.epochs)
        for place, pool in enumerate(pools)
    ]
    return streams[0] if len(streams) == 1 else PromptMixture(streams, [pool.weight for pool in pools])
