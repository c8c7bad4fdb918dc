"""Calls in completions: found in the last turn, answered in ids, never trained and never scored."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from jaxrl_llm.envs.tool_use import Calling, ToolUse, TurnLimits
from jaxrl_llm.envs.tools.calculator import calculate
from jaxrl_llm.envs.tools.protocol import ToolBrokenError
from jaxrl_llm.envs.turns import extended
from jaxrl_llm.rewards.exact import exact_match
from jaxrl_llm.rollout.batching import Selection, select
from jaxrl_llm.text.sentencepiece import build_sentencepiece
from jaxrl_llm.types import Completion, EpisodeGroup, PromptTask, UserError

TASK = PromptTask("t", np.array([2], np.int32), "6*7=", "42", "s", "exact")
LIMITS = TurnLimits(tokens=40, turn_tokens=12, answer_tokens=8, calls=2)


def encode(text):
    """Characters as ids; half of them are missing."""
    if missing := [char for char in text if not 32 <= ord(char) < 127]:
        raise UserError(f"no id for {missing[0]!r}")
    return [ord(char) for char in text]


def decode(ids):
    return "".join(map(chr, ids))


def shouting(asked):
    return asked.upper()


def make(**how):
    callings = [Calling("<c>", "</c>", calculate), Calling("<s>", "</s>", shouting)]
    known = {"decode": decode, "encode": encode, "callings": callings, "marks": (encode("["), encode("]"))}
    known |= {"score": partial(exact_match, correct=1.0, wrong=-1.0), "limits": LIMITS}
    return ToolUse(**known | how)


def said(text, finish="stop_string", version=3):
    ids = np.array([*encode(text), *([1] if finish == "stop" else [])], np.int32)
    n = len(ids)
    return Completion(ids, np.full(n, -0.5, np.float32), np.full(n, version, np.int32), np.zeros(n, bool), finish)


def played(environment, *turns):
    """The completion of these turns, the tools' answers between them."""
    whole = None
    for turn in turns:
        whole = turn if whole is None else extended(whole, turn)
        if turn.finish == "stop_string":
            whole = environment.next_turn(TASK, whole).completion
    return whole


def test_a_call_is_answered_behind_it_in_ids():
    turn = make().next_turn(TASK, said("So <c>6*7</c>"))
    completion = turn.completion
    assert decode(completion.tokens_T) == "So <c>6*7</c>[42]"
    assert completion.forced_T.tolist() == [False] * 13 + [True] * 4
    assert completion.logprobs_T.tolist() == [-0.5] * 13 + [0.0] * 4
    assert set(completion.versions_T) == {3}
    assert (completion.turns, turn.more) == ((17,), 12)


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("<s>a</s>", "A"),
        ("<c>9<c>1+1</c>", "2"),  # the nearest mark opens
        ("<s>x</s><c>1+1</c>", "X"),  # what is closed first was called: nothing is behind it in truth
        ("<s>a<c>1</s>", "A<C>1"),
        ("1+1</c>", "error: <"),  # cut to 8 tokens
        ("<s>1+1</c>", "error: <"),
        ("<s></s>", ""),
        ("<c></c>", "error: t"),
        ("<s>abcdefghijklmnop</s>", "ABCDEFGH"),
        ("<c>9**9**9**9</c>", "error: a"),
    ],
)
def test_what_stands_between_the_marks_is_asked(written, answer):
    found = make().next_turn(TASK, said(written)).completion
    assert decode(found.tokens_T) == f"{written}[{answer}]"


def test_an_unopened_mark_is_said():
    limits = replace(LIMITS, tokens=99, answer_tokens=60)
    found = make(limits=limits).next_turn(TASK, said("<s>1+1</c>")).completion
    assert decode(found.tokens_T) == "<s>1+1</c>[error: </c> without <c>]"


def test_a_call_of_an_earlier_turn_is_not_asked_again():
    environment = make()
    whole = played(environment, said("<c>1+1</c>"), said("</c>"))
    assert decode(whole.tokens_T) == "<c>1+1</c>[2]</c>[error: <]"


def test_an_answers_marks_and_calls_are_plain_text():
    environment = make(
        callings=[Calling("<s>", "</s>", lambda asked: "]<s>b</s>")], limits=replace(LIMITS, answer_tokens=20)
    )
    whole = played(environment, said("<s>a</s>"), said("42", "stop"))
    assert decode(whole.tokens_T[:-1]) == "<s>a</s>[]<s>b</s>]42"
    assert environment.text(whole) == "42"


def test_the_limits_end_an_episode():
    environment = make()
    first = environment.next_turn(TASK, said("<c>1+1</c>"))
    assert (len(first.completion.tokens_T), first.more) == (13, 12)
    second = environment.next_turn(TASK, extended(first.completion, said("aa<c>1+1</c>")))
    assert (second.completion.turns, second.more) == ((13, 28), 12)  # 40 - 13 - 12 - 3
    third = environment.next_turn(TASK, extended(second.completion, said("<c>1</c>")))
    assert (third.more, third.completion.finish, third.completion.turns) == (0, "length", (13, 28))
    # What does not fit with a token more is left out, and the episode is cut off.
    for room, more in ((14, 1), (13, 0)):
        turn = make(limits=replace(LIMITS, tokens=room)).next_turn(TASK, said("<c>1+1</c>"))
        assert turn.more == more
        assert turn.completion.finish == ("stop_string" if more else "length")
        assert len(turn.completion.tokens_T) == (13 if more else 10)


def test_text_that_has_no_tokens_is_replaced():
    tool = Calling("<s>", "</s>", lambda asked: "5\u20ac\0\ud800\xfc!")
    assert decode(make(callings=[tool]).next_turn(TASK, said("<s></s>")).completion.tokens_T) == "<s></s>[5????!]"
    # A vocabulary without a question mark, and SentencePiece's own character for a space.
    tokenizer = build_sentencepiece(["<s>/5! "], vocab_size=20)
    tool = Calling("<s>", "</s>", lambda asked: "5\u20ac\u2581 !")
    environment = make(callings=[tool], decode=tokenizer.decode, encode=tokenizer.encode, marks=([], []))
    call = np.array(tokenizer.encode("<s></s>"), np.int32)
    completion = replace(said("1234567"), tokens_T=call)
    assert tokenizer.decode(environment.next_turn(TASK, completion).completion.tokens_T) == "<s></s>5 !"


def test_a_flood_is_cut_before_it_is_encoded():
    seen = []

    def counting(text):
        seen.append(len(text))
        return encode(text)

    tool = Calling("<s>", "</s>", lambda asked: "x" * 10**7)
    turn = make(callings=[tool], encode=counting).next_turn(TASK, said("<s></s>"))
    assert decode(turn.completion.tokens_T) == "<s></s>[xxxxxxxx]"
    assert max(seen) <= 64 * 8


def test_what_a_tool_says_is_neither_scored_nor_trained():
    environment = make()
    gold = played(environment, said("<c>6*7</c>"), said("41", "stop"))  # the tool says it, the policy does not
    right = played(environment, said("<c>6*7</c>"), said("42", "stop"))
    silent = played(environment, said("<c>6*7</c>"), said("", "stop"))
    cut = played(environment, said("<c>6*7</c>"), said("42", "length"))
    early = said("<c>6*7</c>42", "stop")  # in a turn of its own it would be text like any other
    episodes = environment.episodes(TASK, [gold, right, silent, cut, early])
    assert [e.reward.value for e in episodes] == [-1.0, 1.0, -1.0, -1.0, -1.0]
    assert environment.transcript(right) == "<c>6*7</c>[42]42"
    assert [environment.text(c) for c in (gold, silent)] == ["41", ""]

    how = Selection(
        advantages=lambda rewards, keep: np.ones_like(rewards),
        token_weights=lambda lengths, prompt, keep: 1.0 / lengths,
        zero_variance_filter=False,
    )
    documents = select([EpisodeGroup(0, TASK, tuple(episodes))], how).documents
    for document, completion in zip(documents, (gold, right, silent, cut, early), strict=True):
        assert (document.weights_C != 0).tolist() == (~completion.forced_T).tolist()
        assert document.weights_C.sum() == pytest.approx(1.0)  # the tool's tokens are in no denominator either


def test_a_tool_of_ours_that_breaks_is_a_failed_reward_and_never_a_wrong_one():
    def broken(asked):
        raise ToolBrokenError("python: no jail could be started")

    environment = make(callings=[Calling("<s>", "</s>", broken)])
    turn = environment.next_turn(TASK, said("<s>42</s>"))
    assert turn.more == 0
    assert turn.completion.failed == "python: no jail could be started"
    sound = said("42", "stop")
    for completions in ([turn.completion, sound], [turn.completion]):
        episodes = environment.scored_by(environment.score).episodes(TASK, completions)
        assert [e.reward.failed for e in episodes] == [c.failed for c in completions]
        assert [e.completion for e in episodes] == completions
    assert episodes[0].reward.parts == {}


def test_an_answer_of_nothing_begins_a_turn_too():
    environment = make(callings=[Calling("<s>", "</s>", lambda asked: "")], marks=([], []))
    whole = played(environment, said("<s>4</s>"), said("<s></s>"), said("42", "stop"))
    assert whole.turns == (8, 15)
    assert not whole.forced_T.any()
    assert environment.text(whole) == "42"
    assert environment.next_turn(TASK, played(environment, said("<s>4</s>"), said("<s></s>"))).more == 0  # two calls
