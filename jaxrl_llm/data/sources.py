"""From the configuration's sources to problems in text, and from those to tasks in tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxrl_llm.config import COMPARING, FieldsConfig, SourceConfig
from jaxrl_llm.data.arithmetic import arithmetic
from jaxrl_llm.data.declared import hold_out, read_problems
from jaxrl_llm.data.problem import Problem, Split
from jaxrl_llm.data.procedural import Cell, split_cells
from jaxrl_llm.data.programs import programs
from jaxrl_llm.data.prompts import overlaps, plain_text
from jaxrl_llm.data.reasoning_gym import reasoning_gym
from jaxrl_llm.data.rows import ArrayRecords, JsonLines, Rows, hugging_face, parquet
from jaxrl_llm.data.sequences import copying, counting, sorting
from jaxrl_llm.types import PromptTask, UserError

Encode = Callable[[str, str | None], Sequence[int]]  # (the user's text, the system's) -> the prompt's ids


@dataclass(frozen=True)
class Source:
    """A source's problems in text. `overlapping` counts training prompts left out because they are held out."""

    how: SourceConfig
    split: Split
    overlapping: int = 0

    def user_text(self, problem: Problem) -> str:
        """What the user says."""
        return self.how.template.replace("{prompt}", problem.prompt)

    def gold(self, problem: Problem) -> str | None:
        """A completion that is right, where one is known: the answer itself if the reward compares texts."""
        return problem.answer if self.how.reward in COMPARING else problem.solution


@dataclass(frozen=True)
class SourceTasks:
    """A source in tokens. `too_long` counts the prompts left out on either side because they are."""

    name: str
    weight: float
    train: list[PromptTask]
    heldout: list[PromptTask]
    too_long: int = 0


def load_sources(configs: Sequence[SourceConfig], *, seed: int, overlap: str) -> list[Source]:
    """Reads and draws every source, and keeps training prompts `apart` from those that are held out.

    Raises UserError naming the source, for bad files and values, and as `apart` does.
    """
    return apart(read_sources(configs, seed=seed), overlap)


def read_sources(configs: Sequence[SourceConfig], *, seed: int) -> list[Source]:
    """Every source as it is. Raises UserError naming the source, for bad files and values."""
    sources = []
    for how in configs:
        try:
            sources.append(Source(how, _split(how, seed)))
        except UserError as error:
            raise UserError(f"data.sources.{how.name}: {error}") from None
    return sources


def find_overlaps(sources: Sequence[Source]) -> dict[tuple[str, str], int]:
    """(source, source that holds it out) -> how many training prompts; see prompts.overlaps."""
    return overlaps(
        {source.how.name: [problem.prompt for problem in source.split.train] for source in sources},
        {source.how.name: [problem.prompt for problem in source.split.heldout] for source in sources},
    )


def encode_source(
    source: Source,
    encode: Encode,
    encode_completion: Callable[[str], Sequence[int]],
    *,
    max_prompt_tokens: int,
    max_new_tokens: int,
    too_long: str,
) -> SourceTasks:
    """The source in tokens; with `too_long` "drop", prompts of more than `max_prompt_tokens` are left out.

    Raises UserError naming the task for a text that has no tokens or characters without any, for such a prompt with
    "refuse", and for a known right completion that is longer than any may be.
    """
    how, name, left_out = source.how, source.how.name, 0

    def tasks(problems: Sequence[Problem]) -> list[PromptTask]:
        nonlocal left_out
        found = []
        for problem in problems:
            task_id, text = f"{name}/{problem.id}", source.user_text(problem)
            try:
                ids = encode(text, how.system_prompt)
                gold = source.gold(problem)
                needed = 0 if gold is None else len(encode_completion(gold)) + 1
            except UserError as error:
                raise UserError(f"{task_id}: {error}") from None
            if not ids:
                raise UserError(f"prompt {text!r} ({task_id}) has no tokens")
            if len(ids) > max_prompt_tokens:
                if too_long == "refuse":
                    raise UserError(
                        f"prompt {_short(text)} ({task_id}) has {len(ids)} tokens, more than "
                        f"rollout.max_prompt_tokens = {max_prompt_tokens}; raise it, or set data.too_long=drop"
                    )
                left_out += 1
                continue
            if needed > max_new_tokens:
                raise UserError(
                    f"the right completion {_short(str(gold))} ({task_id}) needs {needed} tokens with its end, more "
                    f"than rollout.max_new_tokens = {max_new_tokens}; raise it"
                )
            tokens_T = np.array(ids, np.int32)
            found.append(PromptTask(task_id, tokens_T, text, problem.answer, name, how.reward, gold))
        return found

    train, heldout = tasks(source.split.train), tasks(source.split.heldout)
    if not train:
        raise UserError(f"data.sources.{name} has no training prompt of at most {max_prompt_tokens} tokens")
    return SourceTasks(name, how.weight, train, heldout, left_out)


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")


def _split(how: SourceConfig, seed: int) -> Split:
    values = how.model_dump()
    if how.kind in _CELLS:
        make, keys = _CELLS[how.kind]
        cells: list[Cell] = make(**{key: values[key] for key in keys})
        return split_cells(cells, heldout=values["heldout"], train=how.train, seed=seed)
    if how.kind == "reasoning_gym":
        return reasoning_gym(
            values["task"], values["options"], heldout=values["heldout"], train=values["train"], seed=seed
        )
    problems = _problems(how, _rows(how, str(how.path), str(how.split)))
    if how.heldout_path is not None:
        return Split(problems, _problems(how, _rows(how, how.heldout_path, "")))
    if how.heldout_split is not None:
        return Split(problems, _problems(how, _rows(how, str(how.path), how.heldout_split)))
    return hold_out(problems, values["heldout"], seed=seed)


_CELLS: Mapping[str, tuple[Callable[..., list[Cell]], tuple[str, ...]]] = {
    "arithmetic": (arithmetic, ("task", "low", "high")),
    "sorting": (sorting, ("low", "high", "shortest", "longest")),
    "copying": (copying, ("alphabet", "shortest", "longest")),
    "counting": (counting, ("alphabet", "shortest", "longest")),
    "programs": (programs, ("low", "high", "shortest", "longest")),
}


def _problems(how: SourceConfig, rows: Rows) -> list[Problem]:
    fields = how.fields or FieldsConfig()
    return read_problems(
        rows,
        prompt=fields.prompt,
        answer=fields.answer,
        id=fields.id,
        answer_after=how.answer_after,
        solution=fields.solution,
    )


def _rows(how: SourceConfig, path: str, split: str) -> Rows:
    fields = how.fields or FieldsConfig()
    match how.kind:
        case "jsonl":
            return JsonLines(path)
        case "arrayrecord":
            return ArrayRecords(path)
        case "parquet":
            named = (fields.prompt, fields.answer, fields.id, fields.solution)
            return parquet(path, [name for name in named if name is not None])
        case "hf":
            return hugging_face(path, split=split, revision=how.revision)
    raise AssertionError(f"kind {how.kind} has no rows")


def apart(sources: list[Source], overlap: str) -> list[Source]:
    """No training prompt that is held out, in whichever source: such prompts are left out of training with `overlap`
    "drop". With "refuse" they raise UserError."""
    counts = find_overlaps(sources)
    if not counts:
        return sources
    if overlap == "refuse":
        (name, other), count = next(iter(counts.items()))
        raise UserError(
            f"{count} training prompts of data.sources.{name} are held out by data.sources.{other}; separate them, or "
            "set data.overlap=drop to train without them (see `jaxrl data inspect`)"
        )
    held = {plain_text(problem.prompt) for source in sources for problem in source.split.heldout}
    kept = []
    for source in sources:
        train = [problem for problem in source.split.train if plain_text(problem.prompt) not in held]
        left_out = len(source.split.train) - len(train)
        kept.append(replace(source, split=Split(train, source.split.heldout), overlapping=left_out))
    return kept
