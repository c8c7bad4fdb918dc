"""The tools of a run, bound from the configuration and checked against its tokenizer."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.config import RolloutConfig
from jaxrl_llm.envs.single_turn import SingleTurn
from jaxrl_llm.envs.tool_use import Calling, ToolUse, TurnLimits
from jaxrl_llm.envs.tools.calculator import calculate
from jaxrl_llm.envs.tools.protocol import Tool
from jaxrl_llm.envs.tools.python import PythonTool
from jaxrl_llm.rollout.turns import Tools
from jaxrl_llm.sandbox.limits import Limits
from jaxrl_llm.text.chat import encode_trusted
from jaxrl_llm.text.tokenizer import Tokenizer
from jaxrl_llm.types import UserError


def sandbox_limits(rollout: RolloutConfig, *, wall_s: float) -> Limits:
    """What one program may use up."""
    box = rollout.sandbox
    return Limits(
        wall_s=wall_s,
        memory_bytes=box.memory_mb * 2**20,
        processes=box.processes,
        output_bytes=box.output_kb * 2**10,
        disk_bytes=box.disk_mb * 2**20,
    )


def python_tool(rollout: RolloutConfig) -> PythonTool | None:
    """The tool python, not yet started; None if it is not in use."""
    if "python" not in rollout.tools.use:
        return None
    limits = sandbox_limits(rollout, wall_s=rollout.tools.python_wall_s)
    return PythonTool(limits, workers=rollout.sandbox.count)


def make_environment(
    rollout: RolloutConfig, tokenizer: Tokenizer, python: PythonTool | None, how: Mapping[str, Any]
) -> SingleTurn:
    """What turns completions into episodes: SingleTurn of `how`, or ToolUse where tools are in use.

    Raises UserError for marks that the tokenizer cannot write, and for answers that could never fit.
    """
    config = rollout.tools
    if not config.use:
        return SingleTurn(decode=tokenizer.decode, **how)
    for name, marks in config.marks.items():
        for mark in marks:
            _check_mark(tokenizer, mark, f"rollout.tools.{name}")
    before, behind = (_ids(tokenizer, mark, "rollout.tools.output") for mark in config.output)
    marked = len(before) + len(behind)
    if (needed := config.max_output_tokens + marked + 1) >= rollout.max_new_tokens:
        raise UserError(
            f"rollout.tools.max_output_tokens {config.max_output_tokens} + the marks' {marked} tokens + 1 = {needed} "
            f"leave a call no room in rollout.max_new_tokens = {rollout.max_new_tokens}; raise that, or lower the first"
        )
    tools: dict[str, Tool] = {"calculator": calculate} | ({"python": python} if python is not None else {})
    return ToolUse(
        decode=tokenizer.decode,
        encode=tokenizer.encode,
        callings=[Calling(*marks, tools[name]) for name, marks in config.marks.items()],
        marks=(before, behind),
        limits=TurnLimits(rollout.max_new_tokens, turn_tokens(rollout), config.max_output_tokens, config.max_calls),
        **how,
    )


def turn_tokens(rollout: RolloutConfig) -> int:
    """The most tokens that the policy may write at once."""
    return min(rollout.tools.max_turn_tokens or rollout.max_new_tokens, rollout.max_new_tokens)


def stop_strings(rollout: RolloutConfig) -> tuple[str, ...]:
    """What ends a turn."""
    return tuple(closing for _, closing in rollout.tools.marks.values())


def bound_tools(environment: SingleTurn, rollout: RolloutConfig) -> Tools | None:
    """Who answers calls, and how many at once; None without tools."""
    if not isinstance(environment, ToolUse):
        return None
    return Tools(environment.next_turn, rollout.sandbox.count if "python" in rollout.tools.use else 1)


def _check_mark(tokenizer: Tokenizer, mark: str, key: str) -> None:
    """A mark is looked for in the text of completions, so it must be one that they can hold."""
    if special := next((name for name in tokenizer.special_tokens if name in mark), None):
        raise UserError(
            f"{key}: the mark {mark!r} holds the special token {special}, which is not part of a completion's text; "
            "choose another mark"
        )
    read = tokenizer.decode(_encoded(tokenizer.encode, mark, key))
    if mark not in read:
        raise UserError(f"{key}: the tokenizer reads its own ids of the mark {mark!r} as {read!r}; choose another mark")


def _ids(tokenizer: Tokenizer, mark: str, key: str) -> list[int]:
    return _encoded(lambda text: encode_trusted(tokenizer, text), mark, key)


def _encoded(encode: Callable[[str], list[int]], mark: str, key: str) -> list[int]:
    try:
        return encode(mark)
    except UserError as error:
        raise UserError(f"{key}: the mark {mark!r} cannot be written: {error}") from None
