"""Reading run directories, also those of killed and resumed runs."""

import json

import numpy as np
import pytest

from jaxrl_llm.report.run_files import last, read_run, series
from jaxrl_llm.types import UserError


def test_reads_what_was_written(run_dir):
    run = read_run(run_dir)
    assert [line["step"] for line in run.metrics] == list(range(1, 65))
    assert run.metric == "mean@4"
    assert run.curve("flops").compute.tolist() == [3e9 * step for step in range(0, 65, 2)]
    assert run.curve("device_seconds").compute[1] == pytest.approx(2.2)
    assert run.unreadable == {}


def test_truncated_last_line_is_ignored(run_dir):
    for name in ("metrics.jsonl", "eval.jsonl", "samples.jsonl"):
        path = run_dir / name
        path.write_bytes(path.read_bytes()[:-9])
    run = read_run(run_dir)
    assert len(run.metrics) == 63
    assert len(run.evaluations) == 32
    assert run.unreadable == {}


def test_unfinished_line_that_a_resumed_run_wrote_after_is_counted(run_dir):
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:40], lines[40][:25] + lines[40], *lines[41:]]) + "\n")
    run = read_run(run_dir)
    assert len(run.metrics) == 63
    assert run.unreadable == {"metrics.jsonl": 1}


def test_steps_done_again_after_a_resume_count_once(run_dir):
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines()
    again = [json.dumps(json.loads(line) | {"reward_mean": 9.0}) for line in lines[50:55]]
    path.write_text("\n".join(lines[:60] + again) + "\n")
    run = read_run(run_dir)
    assert [line["step"] for line in run.metrics] == list(range(1, 56))
    assert [line["reward_mean"] for line in run.metrics[50:]] == [9.0] * 5


def test_several_samples_of_one_step_are_kept(run_dir):
    lines = [{"step": step, "completion": str(k)} for step in (1, 2) for k in range(3)]
    (run_dir / "samples.jsonl").write_text("\n".join(json.dumps(line) for line in [*lines, lines[3]]) + "\n")
    assert [line["completion"] for line in read_run(run_dir).samples] == ["0", "1", "2", "0", "1", "2", "0"]


def test_series_leaves_out_what_is_no_number():
    records = [
        {"step": 1, "x": 2},
        {"step": 2, "x": None},
        {"step": 3},
        {"step": 4, "x": float("nan")},
        {"step": 5, "x": 3.5},
    ]
    steps, values = series(records, "x")
    np.testing.assert_array_equal(steps, [1.0, 5.0])
    np.testing.assert_array_equal(values, [2.0, 3.5])
    assert last(records, "y") is None


def test_curve_names_the_step_that_says_nothing(run_dir):
    path = run_dir / "eval.jsonl"
    path.write_text(path.read_text().replace('"step": 4,', '"step": 4, "tokens_": 1,').replace('"tokens": 8800,', ""))
    run = read_run(run_dir)
    assert len(run.curve("flops")) == 33
    with pytest.raises(UserError, match="no tokens at step 4"):
        run.curve("tokens")


def test_not_a_run_directory(tmp_path):
    with pytest.raises(UserError, match="no run directory"):
        read_run(tmp_path / "none")
    with pytest.raises(UserError, match="is no run directory: it has none of"):
        read_run(tmp_path)
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(UserError, match=r"state\.json is not JSON"):
        read_run(tmp_path)
