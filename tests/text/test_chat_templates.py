"""Templates of nine families: as transformers renders them, and no text of theirs becomes a special token."""

import itertools
import json
import random
from pathlib import Path

import pytest
from chat_families import TEMPLATES, Spelled
from conversations import CASES, NOW, TOOLS

from jaxrl_llm.text.chat import render_chat
from jaxrl_llm.types import UserError

STORED = json.loads((Path(__file__).parents[1] / "data" / "chat_renderings.json").read_text())


@pytest.mark.parametrize(("family", "case"), list(itertools.product(TEMPLATES, CASES)))
def test_conversations_are_rendered_as_transformers_does(family, case):
    template, specials = TEMPLATES[family]
    tokenizer = Spelled(template, specials)
    stored = STORED[family][case]
    if stored is None:
        with pytest.raises(UserError, match="cannot be rendered"):
            render_chat(tokenizer, now=NOW, **CASES[case])
        return
    parts = render_chat(tokenizer, now=NOW, **CASES[case])
    assert tokenizer.spell(parts) == stored
    assert not [part for part in parts if isinstance(part, str) and any(name in part for name in specials)]
    begins = specials[0] in stored
    assert parts.count(tokenizer.bos_id) == begins  # once, though the tokenizer would add another to a text
    assert not begins or parts[0] == tokenizer.bos_id


def _hostile(value, spoil):
    """`value` with every text in it, but for roles and types, put through `spoil`."""
    if isinstance(value, str):
        return spoil(value)
    if isinstance(value, list):
        return [_hostile(one, spoil) for one in value]
    if isinstance(value, dict):
        return {
            key: one if key in ("role", "type", "required", "id", "tool_call_id") else _hostile(one, spoil)
            for key, one in value.items()
        }
    return value


@pytest.mark.parametrize("family", TEMPLATES)
def test_whatever_stands_in_a_text_the_special_tokens_are_the_templates(family):
    """Whole names, halves at both ends, halves around what a template cuts out, and stand-ins of the disguise."""
    template, specials = TEMPLATES[family]
    tokenizer = Spelled(template, specials)
    halves = [part for name in specials for part in (name, name[: len(name) // 2], name[len(name) // 2 :])]
    bits = [*halves, "</think>", "<think>", "<tool_response>", "\ue000", "\ue001", "x", " ", "\n", '"', "\\", "user"]
    source = random.Random(family)
    rendered = 0
    for case in CASES.values():
        expected = STORED[family][next(name for name in CASES if CASES[name] is case)]
        if expected is None:
            continue
        plain = [part for part in render_chat(tokenizer, now=NOW, **case) if not isinstance(part, str)]
        for _ in range(4):
            spoil = lambda text: "".join([*source.choices(bits, k=3), text, *source.choices(bits, k=3)])  # noqa: E731
            try:
                parts = render_chat(tokenizer, now=NOW, **(case | {"messages": _hostile(case["messages"], spoil)}))
            except UserError:
                continue  # refused, not followed
            rendered += 1
            assert [part for part in parts if not isinstance(part, str)] == plain
    assert rendered > 20


def test_a_special_token_that_a_template_would_make_by_cutting_is_none():
    tokenizer = Spelled("{{ '<|im_start|>' + messages[0].content.replace('<x>', '') }}", ("<|im_start|>", "<|im_end|>"))
    for text in ("<|im_<x>end|>", "<<x>|im_end|>", "<|im_end|<x>>", "<|<x>im_end|>a"):
        with pytest.raises(UserError, match="leaves out or rewrites"):
            render_chat(tokenizer, [{"role": "user", "content": text}])
        assert render_chat(tokenizer, [{"role": "assistant", "content": text}]) == [0, text.replace("<x>", "")]


def test_a_special_token_around_a_text_is_none():
    template = "{{ '<|' + messages[0].name + '|>' + messages[0].content }}"
    tokenizer = Spelled(template, ("<|im_start|>", "<|im_end|>"))
    message = {"role": "user", "content": "x", "name": "im_end"}
    assert render_chat(tokenizer, [message]) == ["<|im_end|>x"]


def test_tools_cannot_write_special_tokens_either():
    template, specials = TEMPLATES["qwen2.5"]
    tokenizer = Spelled(template, specials)
    hostile = [{"type": "function", "function": {"name": "<|im_end|>", "<|im_start|>": {"<|im_end|>": "<|im_end|>"}}}]
    messages = [{"role": "user", "content": "x"}]
    parts = render_chat(tokenizer, messages, tools=hostile)
    plain = render_chat(tokenizer, messages, tools=TOOLS)
    assert [part for part in parts if isinstance(part, int)] == [part for part in plain if isinstance(part, int)]
    assert json.dumps(hostile[0]) in tokenizer.spell(parts)


def test_a_turn_is_left_open_where_its_text_ends():
    template, specials = TEMPLATES["gemma"]
    tokenizer = Spelled(template, specials)
    question = {"role": "user", "content": "1+1"}

    def open_turn(content):
        messages = [question, {"role": "assistant", "content": content}]
        return render_chat(tokenizer, messages, add_generation_prompt=False, continue_final_message=True)

    start = render_chat(tokenizer, [question])
    assert open_turn("It is") == [*start[:-1], "model\nIt is"]
    assert open_turn([{"type": "text", "text": "It is "}]) == [*start[:-1], "model\nIt is"]
    with pytest.raises(UserError, match="no text to continue"):
        open_turn([])
    with pytest.raises(UserError, match="exclude each other"):
        render_chat(tokenizer, [question], continue_final_message=True)


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([], {}, "at least one message"),
        ([{"role": "im_end", "content": "x"}], {}, "the role 'im_end'; known: system"),
        ([{"role": "user", "content": Path("x")}], {}, "holds a PosixPath"),
        ([{"role": "user", "content": "x"}], {"variables": {"messages": []}}, "variables may not hold 'messages'"),
        ([{"role": "user", "content": "x"}], {"variables": {"bos_token": "y"}}, "variables may not hold 'bos_token'"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": "y"}], {}, "cannot be rendered: turns must"),
    ],
)
def test_conversations_that_cannot_be_rendered(messages, options, message):
    with pytest.raises(UserError, match=message):
        render_chat(Spelled(*TEMPLATES["gemma"]), messages, **options)


def test_the_clock_is_the_machines_unless_given():
    tokenizer = Spelled("{{ strftime_now('%Y') + messages[0].content }}", ("<s>", "</s>"))
    message = {"role": "user", "content": "x"}
    assert render_chat(tokenizer, [message], now=NOW) == ["2026x"]
    assert render_chat(tokenizer, [message])[0][:2] in ("20", "21")


def test_what_a_generation_block_sets_stays_in_it():
    source = "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ messages[0].content }}{% endgeneration %}{{ a }}"
    assert render_chat(Spelled(source, ("<s>", "</s>")), [{"role": "user", "content": "x"}]) == ["x1"]


def test_a_text_that_a_template_changes_cannot_be_told_from_its_own():
    tokenizer = Spelled("{{ messages[0].content | upper }}", ("<s>", "</s>"))
    with pytest.raises(UserError, match="rewrites a message, or treats it"):
        render_chat(tokenizer, [{"role": "assistant", "content": "hello"}])


@pytest.mark.parametrize("given", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_found_under_each_of_its_names(given):
    tokenizer = Spelled("{{ messages[0].reasoning_content ~ messages[0].thinking }}", ("<s>", "</s>"))
    assert render_chat(tokenizer, [{"role": "assistant", given: "hm"}]) == ["hmhm"]
    message = {"role": "assistant", "thinking": "a", "reasoning_content": "b", "content": None}
    assert render_chat(tokenizer, [message]) == ["ba"]
