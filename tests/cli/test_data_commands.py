"""`jaxrl data inspect`, `passrate` and `eval` on tiny policies."""

import json

import pytest
import yaml
from tiny_run import TINY

from jaxrl_llm.cli import measuring
from jaxrl_llm.cli.assemble import assemble
from jaxrl_llm.cli.console import Progress
from jaxrl_llm.config import load

# Its text gives the tokenizer the characters that what is left of the file does not hold.
TEACHER = "{name: sums, kind: arithmetic, low: 1, high: 9, heldout: 1}"
TWO = """
sources:
- {name: sums, kind: arithmetic, low: 1, high: 9, heldout: 16, weight: 3}
- {name: letters, kind: copying, alphabet: ab, longest: 2, heldout: 2, train: null, template: "{prompt}"}
"""


@pytest.fixture
def mixture(tmp_path):
    tree = yaml.safe_load(TINY) | {"data": yaml.safe_load(TWO)}
    tree["rollout"] |= {"max_prompt_tokens": 9}
    tree["model"]["max_context"] = 12
    path = tmp_path / "mixture.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def rows(path, name, prompts):
    file = path / name
    file.write_text("".join(json.dumps({"prompt": p, "answer": "1"}) + "\n" for p in prompts))
    return file


def test_inspect_shows_rows_counts_and_overlaps(mixture, jaxrl):
    train = rows(mixture.parent, "train.jsonl", ["1+1=", "2+2=", "2+2=", "1+1=1+1=1+1="])
    heldout = rows(mixture.parent, "heldout.jsonl", ["2+2=", "1="])
    source = f"{{name: file, kind: jsonl, path: {train}, heldout_path: {heldout}, template: 'Q{{prompt}}'}}, {TEACHER}"
    status, out, err = jaxrl("data", "inspect", mixture, f"data.sources=[{source}]", "--json")
    assert status == 0, err
    found = json.loads(out)
    file = found["sources"]["file"]
    assert {"train": "file", "heldout": "file", "prompts": 2} in found["overlaps"]
    assert {"train": "sums", "heldout": "file", "prompts": 1} in found["overlaps"]  # 2+2= again
    assert (file["train"], file["heldout"], file["too_long"], file["held_out_elsewhere"]) == (1, 2, 1, 2)
    assert [row["prompt"] for row in file["rows"]] == ["Q1+1="]
    assert (file["rows"][0]["decoded"], file["rows"][0]["gold"]) == ("Q1+1=", "1")
    assert file["prompt_tokens"] == {"min": 5, "mean": 5.0, "max": 5}
    status, out, _ = jaxrl("data", "inspect", mixture, f"data.sources=[{source}]", "--rows", "1")
    assert status == 0
    assert "overlap: 2 training prompts of file are held out by file" in out
    assert "train file/1 (5 tokens): 'Q1+1=' -> '1'" in out
    # What inspect counts, training refuses or leaves out.
    status, _, err = jaxrl("train", mixture, f"data.sources=[{source}]", "--run-dir", mixture.parent / "run")
    assert (status, err.count("\n")) == (2, 1)
    assert "2 training prompts of data.sources.file are held out by data.sources.file; separate them, or" in err
    how = [f"data.sources=[{source}]", "data.overlap=drop", "eval.prompts=2"]
    with pytest.raises(Exception, match=r"has \d+ tokens, more than rollout.max_prompt_tokens = 9; raise it, or set"):
        assemble(load(mixture, how))
    setup = assemble(load(mixture, [*how, "data.too_long=drop"]))
    assert [task.task_id for task in setup.train_tasks if task.source == "file"] == ["file/1"]
    assert [task.task_id for task in setup.heldout_tasks if task.source == "file"] == ["file/1", "file/2"]


def test_a_mixture_names_its_sources_and_evaluates_each(mixture, jaxrl, records):
    run = mixture.parent / "run"
    options = ["train.steps=2", "sft.steps=2", "eval.prompts=16", "algorithm.zero_variance_filter=false"]
    status, _, err = jaxrl("train", mixture, *options, "algorithm.dynamic_sampling=1", "--run-dir", run)
    assert status == 0, err
    last = records(run, "eval")[-1]
    assert last["prompts"] == 18
    assert last["value"] == pytest.approx((16 * last["value/sums"] + 2 * last["value/letters"]) / 18)
    step = records(run, "metrics")[-1]
    dropped = step["prompts_dropped"]
    assert dropped.keys() <= {"all_wrong", "all_right"}
    # An untrained policy is always wrong: two for each of two steps, and what was scored ahead of a third.
    assert 4 <= sum(dropped.values()) <= 6
    assert step["prompts_issued"] == 4 + sum(dropped.values()) + step["prompts_in_flight"]

    out = mixture.parent / "out"
    arguments = ["eval", run, mixture, *options, "--out", out, "--n", "2", "--k", "1", "--k", "2"]
    status, table, err = jaxrl(*arguments)
    assert status == 0, err
    result = json.loads((out / "result.json").read_text())
    assert (result["tasks"]["sums"]["prompts"], result["tasks"]["letters"]["prompts"]) == (16, 2)
    assert result["all"]["avg@2"]["value"] == pytest.approx(result["all"]["pass@1"]["value"])
    assert "sums (16)" in table
    # Cut after five prompts and a half: the rest is sampled again, the same.
    lines = (out / "samples.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 19
    (out / "samples.jsonl").write_text("".join(lines[:6]) + lines[6][:20])
    status, again, err = jaxrl(*arguments, "--json")
    assert status == 0
    assert "has 5 of 18 prompts already" in err
    assert (out / "samples.jsonl").read_text() == "".join(lines)
    assert json.loads(again) == result
    status, _, err = jaxrl(*arguments[:-4], "--n", "3")
    assert (status, err.count("\n")) == (2, 2)  # the first line says what is evaluated
    assert "samples.jsonl was measured with another samples (2 -> 3); name another place" in err
    status, _, err = jaxrl(*arguments, "--k", "3")
    assert "--k 3 is not between 1 and the 2 samples of a prompt" in err


def test_an_evaluation_of_a_mixture_is_told_source_by_source(capsys):
    said = {"step": 2, "metric": "mean@2", "value": 0.5}
    for apart in ({}, {"value/sums": 0.25, "value/letters": 0.75}):
        Progress("run", steps=4).evaluation(said | apart)
    assert capsys.readouterr().out.splitlines() == [
        "step 2: held-out mean@2 0.5000",
        "step 2: held-out mean@2 0.5000 (sums 0.2500, letters 0.7500)",
    ]


def test_pass_rates_build_bands_orders_and_epochs(tiny, jaxrl, monkeypatch):
    rates = tiny.parent / "rates.jsonl"
    status, _, err = jaxrl("passrate", tiny, "--random-weights", "--n", "2", "--out", rates)
    assert status == 0, err
    assert "65 prompts, Avg@2 0." in err
    lines = rates.read_text().splitlines(keepends=True)
    first = json.loads(lines[1])
    assert first.keys() == {"task_id", "right", "total"}
    assert first["total"] == 2
    rates.write_text("".join(lines[:40]))
    status, _, err = jaxrl("passrate", tiny, "--random-weights", "--n", "2", "--out", rates)
    assert "has 39 of 65 prompts already" in err
    assert rates.read_text() == "".join(lines)

    names = [json.loads(line)["task_id"] for line in lines[1:]]
    rates.write_text(
        "".join(json.dumps({"task_id": n, "right": i % 17, "total": 16}) + "\n" for i, n in enumerate(names))
    )
    how = [f"data.curriculum.pass_rates={rates}", "data.curriculum.order=easy_to_hard", "data.curriculum.band=easy"]
    setup = assemble(load(tiny, [*how, "data.curriculum.unique_prompts=10", "data.curriculum.epochs=1"]))
    order = [names.index(task.task_id) % 17 for task in setup.train_tasks]
    assert len(order) == 10
    assert order == sorted(order, reverse=True)
    assert set(order) <= {5, 6, 7, 8, 9}
    other = assemble(load(tiny, how))
    assert setup.fingerprints["data"] != other.fingerprints["data"]
    rates.write_text(rates.read_text().replace(names[3], "addition/none"))
    status, _, err = jaxrl("train", tiny, *how, "--run-dir", tiny.parent / "run")
    assert (status, err.count("\n")) == (2, 1)
    assert "has no pass rate of 1 of 65 training prompts" in err


def test_a_completion_without_a_reward_is_no_wrong_answer():
    records = [
        {"right": [True, None, False, True], "votes": ["1", "1", "2", "1"], "finish": ["stop"] * 4},
        {"right": [None] * 4, "votes": [None] * 4, "finish": ["length"] * 4},
    ]
    found = measuring._metrics(records, 4, [1, 3, 4], 0)
    assert (found["failed"], found["prompts"], found["truncation_rate"]) == (5, 2, 0.5)
    assert found["avg@4"]["value"] == pytest.approx(2 / 3)
    assert found["worst@3"]["value"] == 0.0
    assert found["maj@3"]["value"] == 1.0
    assert "pass@4" not in found  # nobody has four
