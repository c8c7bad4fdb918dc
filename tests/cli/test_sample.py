"""`jaxrl sample`: where weights come from, and that what is printed is what the scheduler made."""

import io
import json
import sys

import numpy as np
import pytest
from policy_reference import make_run, weights
from tiny_run import TINY

from jaxrl_llm.sampler.scheduler import Scheduler
from jaxrl_llm.types import SampleRequest, Sampling

# Another task, and so other characters to build a tokenizer from.
ECHO = [
    "data.sources.addition.task=echo_addition",
    "rollout.max_prompt_tokens=8",
    "rollout.max_new_tokens=16",
    "model.max_context=24",
]


@pytest.fixture(scope="module")
def run_and_setup(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    (folder / "tiny.yaml").write_text(TINY)
    return folder / "run", make_run(folder / "tiny.yaml", folder / "run")


def own(setup, step, texts, sampling, *, n=1, seed=0):
    """The scheduler's completions of these prompts with the weights of a step."""
    scheduler = Scheduler(setup.engine, weights(setup, step), version=step)
    ids = scheduler.submit(
        [
            SampleRequest(np.array(setup.tokenizer.encode(text), np.int32), sampling, seed, stream, sibling)
            for stream, text in enumerate(texts)
            for sibling in range(n)
        ]
    )
    done = dict(scheduler.drain())
    return [done[i] for i in ids]


def text_of(setup, completion):
    ids = completion.tokens_T.tolist()
    return setup.tokenizer.decode(ids[:-1] if completion.finish == "stop" else ids)


def records(out):
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.parametrize("where", ["config and run", "checkpoint"])
def test_the_newest_checkpoint_or_the_one_that_is_named(run_and_setup, jaxrl, where):
    run, setup = run_and_setup
    step = 2 if where == "checkpoint" else 4
    target = {
        "config and run": (run.parent / "tiny.yaml", "--run-dir", run),
        "checkpoint": (run / "checkpoints" / "step_00000002",),
    }[where]
    status, out, err = jaxrl("sample", *target, "--prompt", "3+4=", "--n", 3, "--json", "--seed", 7)
    assert (status, f"step {step} in" in err) == (0, True)
    wanted = own(setup, step, ["3+4="], Sampling(3), n=3, seed=7)
    for i, (record, completion) in enumerate(zip(records(out), wanted, strict=True)):
        assert (record["prompt"], record["index"], record["finish"]) == ("3+4=", i, completion.finish)
        assert record["tokens"] == completion.tokens_T.tolist()
        np.testing.assert_array_equal(np.array(record["logprobs"], np.float32), completion.logprobs_T)
        assert record["versions"] == [step] * len(completion.tokens_T)
        assert record["text"] == text_of(setup, completion)


def test_one_prompt_prints_its_text(run_and_setup, jaxrl):
    run, setup = run_and_setup
    (wanted,) = own(setup, 4, ["3+4="], Sampling(3, 0.0))
    status, out, _ = jaxrl("sample", run / "checkpoints", "--prompt", "3+4=", "--temperature", 0, "--logprobs")
    assert (status, out.splitlines()[0]) == (0, text_of(setup, wanted))
    assert [float(line.split()[0]) for line in out.splitlines()[1:]] == [round(float(p), 4) for p in wanted.logprobs_T]


def test_files_of_prompts(run_and_setup, jaxrl, tmp_path):
    run, setup = run_and_setup
    texts = ["1+1=", "2+2=", "9+9="]
    wanted = own(setup, 4, texts, Sampling(2), n=2)
    (tmp_path / "p.txt").write_text("1+1=\n\n2+2=\n9+9=\n")
    lines = [{"prompt": "1+1="}, {"tokens": setup.tokenizer.encode("2+2=")}, {"prompt": "9+9="}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    command = ("sample", run, "--n", 2, "--max-new-tokens", 2)
    status, out, _ = jaxrl(*command, "--file", tmp_path / "p.jsonl", "--json")
    assert status == 0
    assert [record["tokens"] for record in records(out)] == [c.tokens_T.tolist() for c in wanted]
    status, out, _ = jaxrl(*command, "--file", tmp_path / "p.txt")
    assert [line.startswith("--- ") for line in out.splitlines()] == [True, False] * 6
    assert out.splitlines()[1::2] == [text_of(setup, completion) for completion in wanted]


def test_typed_prompts_and_a_bad_one_among_them(run_and_setup, jaxrl, monkeypatch):
    run, setup = run_and_setup
    monkeypatch.setattr(sys, "stdin", io.StringIO("3+4=\n\nxyz\n5+5=\n"))
    status, out, err = jaxrl("sample", run, "--temperature", 0)
    wanted = [text_of(setup, own(setup, 4, [text], Sampling(3, 0.0))[0]) for text in ("3+4=", "5+5=")]
    assert (status, out.splitlines()) == (0, wanted)
    assert "error: the character 'x'" in err


def test_a_damaged_checkpoint_is_passed_over(run_and_setup, jaxrl, tmp_path, caplog):
    _, setup = run_and_setup
    run = tmp_path / "run"
    make_run(run_and_setup[0].parent / "tiny.yaml", run)
    file = max((run / "checkpoints/step_00000004/arrays").rglob("*"), key=lambda p: p.stat().st_size * p.is_file())
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    status, out, err = jaxrl("sample", run, "--prompt", "3+4=", "--json")
    assert (status, "step 2 in" in err, "damaged" in caplog.text) == (0, True, True)
    assert records(out)[0]["tokens"] == own(setup, 2, ["3+4="], Sampling(3))[0].tokens_T.tolist()
    status, _, err = jaxrl("sample", run / "checkpoints/step_00000004", "--prompt", "3+4=")
    assert (status, "no checkpoint of" in err and "damaged" in err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{config}", "--prompt", "1+1="], "has no weights to sample with"),
        (["{config}", "--run-dir", "{folder}/nothing", "--prompt", "1+1="], "nothing has no checkpoint"),
        (["{run}", "--run-dir", "{run}", "--prompt", "1+1="], "names a run already"),
        (["{config}", *ECHO, "--run-dir", "{run}", "--prompt", "1"], "was trained with another tokenizer"),
        (["{config}", "model.d_ff=32", "--run-dir", "{run}", "--prompt", "1+1="], "has shape"),
        (["{run}", "--prompt", "1+1=", "--file", "x"], "both given"),
        (["{run}", "--file", "{folder}/none.txt"], "cannot be read"),
        (["{run}", "--file", "{folder}/bad.jsonl"], "bad.jsonl line 2: is neither"),
        (["{run}", "--prompt", "1+1=+++"], "a prompt has 7 tokens; the sampler takes 1 to 4"),
        (["{run}", "--prompt", "1+1=", "--temperature", "-1"], "temperature is -1"),
        (["{run}", "--prompt", "1+1=", "--max-new-tokens", "9"], "max_new_tokens is 9"),
        (["{folder}/empty"], "config.yaml"),
    ],
)
def test_what_cannot_be_sampled_is_one_clear_line(run_and_setup, jaxrl, arguments, message):
    run, _ = run_and_setup
    names = {"config": run.parent / "tiny.yaml", "run": run, "folder": run.parent}
    (run.parent / "bad.jsonl").write_text('{"prompt": "1+1="}\n{"text": "1+1="}\n')
    (run.parent / "empty").mkdir(exist_ok=True)
    status, out, err = jaxrl("sample", *(argument.format(**names) for argument in arguments))
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: ")
    assert message in err


def test_random_weights_only_if_asked_for(run_and_setup, jaxrl):
    run, _ = run_and_setup
    status, out, err = jaxrl("sample", run.parent / "tiny.yaml", "--random-weights", "--prompt", "1+1=", "--json")
    assert (status, len(records(out)), "random weights" in err) == (0, 1, True)
