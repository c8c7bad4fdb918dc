"""Tools from the configuration to episodes of several turns: what is refused, and a run that calls the calculator."""

import itertools
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl_llm.cli.answers import reward_processes
from jaxrl_llm.cli.assemble import with_tokenizer
from jaxrl_llm.cli.join import how_to_sample
from jaxrl_llm.cli.tools import bound_tools, make_environment
from jaxrl_llm.config import RolloutConfig, load, validate
from jaxrl_llm.envs.tools.calculator import calculate
from jaxrl_llm.rollout.statistics import measure_lag
from jaxrl_llm.text.sentencepiece import build_sentencepiece
from jaxrl_llm.types import UserError

# One-digit addition writes "1+2=": single characters of its vocabulary serve as marks, so that a policy that knows
# nothing calls all the time.
CALLS = [
    *("rollout.tools.use=[calculator]", "rollout.tools.calculator=['+','=']", "rollout.tools.output=['','']"),
    *("rollout.tools.max_calls=2", "rollout.tools.max_turn_tokens=5", "rollout.tools.max_output_tokens=2"),
    *("rollout.max_new_tokens=8", "sft.steps=0", "train.steps=2", "eval.every=2", "eval.samples=1"),
]


def rollout(**tools):
    how = {"use": ["calculator", "python"]} | tools
    return {"tools": how, "max_new_tokens": 64, "max_prompt_tokens": 16}


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ({"use": ["calculator", "calculator"]}, "use names a tool twice"),
        ({"use": ["browser"]}, "browser|calculator"),
        ({"python": ["", "</python>"]}, "a mark of python is empty"),
        ({"python": ["<python>"]}, "rollout.tools.python"),
        ({"calculator": ["<python>", "</c>"]}, "the mark '<python>' is part of the mark '<python>'"),
        ({"calculator": ["<c>", "c>"]}, "the mark 'c>' is part of the mark '<c>'"),
        ({"output": ["<python>", ""]}, "is part of the mark"),
        ({"python": ["<p>", "x" * 257]}, "has more than 256 bytes"),
        ({"max_calls": 0}, "max_calls"),
        ({"max_turn_tokens": 0}, "max_turn_tokens"),
        ({"python_wall_s": 0}, "python_wall_s"),
    ],
)
def test_settings_that_mean_nothing_are_refused(tools, words):
    with pytest.raises(UserError, match=words):
        validate({"rollout": rollout(**tools)}, "here")


def test_marks_of_tools_that_are_not_in_use_are_nobodys_concern():
    assert RolloutConfig(tools={"use": ["python"], "calculator": ["<python>", ""]}).tools.marks == {
        "python": ("<python>", "</python>")
    }


def test_tools_and_a_thinking_budget_are_refused_together():
    base = {"train": {"row_length": 128}, "model": {"max_context": 128}}
    validate(base | {"rollout": rollout()}, "here")
    with pytest.raises(UserError, match=r"together with rollout.interruption.enabled"):
        validate(base | {"rollout": rollout() | {"interruption": {"enabled": True}}}, "here")


TOKENIZER = build_sentencepiece(["<python></python><output></output>0123456789+="], vocab_size=64)


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ({"python": ["<code>", "</python>"]}, r"rollout.tools.python: the mark '<code>' cannot be written: .*'c'"),
        ({"python": ["<python>", "</s>"]}, "the mark '</s>' holds the special token </s>"),
        ({"output": ["[", ""]}, r"rollout.tools.output: the mark '\[' cannot be written"),
        ({"max_output_tokens": 46}, r"46 \+ the marks' 17 tokens \+ 1 = 64 leave a call no room"),
    ],
)
def test_marks_must_be_writable_and_answers_must_fit(tools, words):
    config = RolloutConfig(**rollout(use=["python"], **({"max_output_tokens": 45} | tools)))
    with pytest.raises(UserError, match=words):
        make_environment(config, TOKENIZER, None, {"score": None})


def test_how_tools_are_bound():
    config = RolloutConfig(**rollout(use=["python"], max_output_tokens=8), sandbox={"count": 3})
    with closing(reward_processes(config, {"exact"})) as processes:
        assert processes.python is not None
        assert processes.examiner is None
        environment = make_environment(config, TOKENIZER, processes.python, {"score": None})
    assert bound_tools(environment, config).at_once == 3
    run = SimpleNamespace(rollout=config, eval=SimpleNamespace(temperature=0.5), seed=1)
    how = how_to_sample(run)
    assert {how.training.stop_strings, how.evaluation.stop_strings} == {("</python>",)}
    assert how.training.max_new_tokens == 64
    plain = RolloutConfig(max_new_tokens=8)
    with closing(reward_processes(plain, {"exact"})) as processes:
        assert processes.python is None
    assert bound_tools(make_environment(plain, TOKENIZER, None, {"score": None}), plain) is None


def test_a_sandbox_that_does_not_hold_stops_a_run(monkeypatch):
    def leaks(jail):
        raise UserError("the sandbox does not hold here: reading a file was not refused")

    monkeypatch.setattr("jaxrl_llm.sandbox.service.self_test", leaks)
    with (
        closing(reward_processes(RolloutConfig(**rollout(use=["python"])), {"exact"})) as processes,
        pytest.raises(UserError, match="the sandbox does not hold here"),
    ):
        processes.start()


def check_episode(task, episode, tokenizer):
    """Every answer is the calculator's, to what stands before it; what stands behind the last one alone is scored."""
    completion = episode.completion
    assert (episode.trainable_T == ~completion.forced_T).all()
    assert len(completion.tokens_T) <= 8
    begins = [0, *completion.turns]
    for begin, end in itertools.pairwise(begins):
        forced = completion.forced_T[begin:end]
        written = completion.tokens_T[begin:end][~forced]
        assert not forced[: len(written)].any()
        assert 1 <= len(written) <= 5
        before, mark, asked = tokenizer.decode(written)[:-1].rpartition("+")
        answer = calculate(asked) if mark else "error: = without +"
        kept = [char for char in answer if char in "+=0123456789"]  # what the vocabulary has; no question mark
        assert tokenizer.decode(completion.tokens_T[begin:end][forced]) == "".join(kept[:2])
        assert "=" not in before
    last = completion.tokens_T[begins[-1] :]
    assert 1 <= len(last) <= 5
    right = completion.finish == "stop" and tokenizer.decode(last[:-1]) == task.answer
    assert episode.reward.value == (1.0 if right else -1.0)


@pytest.fixture
def taken(monkeypatch):
    """What the loop has taken since it was last asked, in the order of the groups' ids."""
    seen = []

    def ask():
        groups = sorted(seen, key=lambda group: group.group_id)
        seen.clear()
        return groups

    def noting(groups, **how):
        seen.extend(groups)
        return measure_lag(groups, **how)

    monkeypatch.setattr("jaxrl_llm.train.loop.measure_lag", noting)
    return ask


def test_a_policy_that_calls_the_calculator_trains(tiny, jaxrl, records, taken):
    run = tiny.parent / "run"
    status, _, err = jaxrl("train", tiny, *CALLS, "--run-dir", run)
    assert status == 0, err
    groups, steps = taken(), records(run, "metrics")
    assert [group.group_id for group in groups] == [0, 1, 2, 3]
    for step in steps:
        settled = step["prompts_trained"] + sum(step["prompts_dropped"].values())
        assert step["prompts_issued"] == settled + step["prompts_in_flight"]
    tokenizer = with_tokenizer(load(tiny, CALLS), None)[1]
    for group in groups:
        for episode in group.episodes:
            check_episode(group.task, episode, tokenizer)
    completions = [episode.completion for group in groups for episode in group.episodes]
    assert {len(c.turns) for c in completions} == {0, 1, 2}
    assert {c.finish for c in completions} == {"stop", "length"}
    assert np.mean([step["tool_calls_mean"] for step in steps]) == np.mean([len(c.turns) for c in completions])
    assert steps[-1]["tokens_generated"] == sum((~c.forced_T).sum() for c in completions)
    assert steps[-1]["interruption_rate"] == 0
    # What tools said is in no log-probability that anybody compares.
    assert all(step["log_ratio_max"] < 1e-3 for step in steps)
    assert all(record["mismatch_max"] < 1e-3 for record in records(run, "eval"))


@pytest.mark.slow
def test_turns_repeat_themselves_and_are_played_by_evaluation_elsewhere(tiny, jaxrl, records, taken):
    run, out, found = tiny.parent / "run", tiny.parent / "out", []
    for place in (run, tiny.parent / "again"):
        status, _, err = jaxrl("train", tiny, *CALLS, "--run-dir", place)
        assert status == 0, err
        found.append([episode.completion for group in taken() for episode in group.episodes])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one.tokens_T, other.tokens_T)
        assert one.turns == other.turns
    status, _, err = jaxrl("eval", run, tiny, *CALLS, "--out", out, "--n", "2")
    assert status == 0, err
    lines = records(out, "samples")[1:]
    assert {finish for line in lines for finish in line["finish"]} == {"stop", "length"}
    assert any("=" in text[:-1] for line in lines for text in line["texts"])  # where a turn ends, another begins
    (out / "samples.jsonl").rename(out / "before")
    (out / "samples.jsonl").write_text("".join((out / "before").read_text().splitlines(keepends=True)[:3]))
    status, _, err = jaxrl("eval", run, tiny, *CALLS, "--out", out, "--n", "2")
    assert status == 0, err
    assert (out / "samples.jsonl").read_text() == (out / "before").read_text()
    status, _, err = jaxrl("eval", run, tiny, *CALLS, "rollout.tools.max_calls=1", "--out", out, "--n", "2")
    assert (status, "was measured with another tools" in err) == (2, True)
