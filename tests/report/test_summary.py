"""The summary: the asked-for keys, worked numbers, strict JSON, whatever the run's state."""

import json

import pytest

from jaxrl_llm.report.fitting import fit_run
from jaxrl_llm.report.summary import summarise

WANTED = {
    *("state", "steps", "metric", "eval_first", "eval_last", "eval_best", "fit", "forecast_error", "lag_max"),
    *("lag_bound", "mismatch_max", "truncation_rate", "prompts_issued", "prompts_trained", "prompts_dropped"),
    *("tokens_generated", "tokens_trained", "wall_s"),
}


def strict(value: object) -> dict:
    return json.loads(json.dumps(value, allow_nan=False))


def test_finished_run(reported_run):
    summary = strict(summarise(reported_run))
    assert summary["sources"] == {}
    assert set(summary) >= WANTED
    evaluations = [json.loads(line) for line in (reported_run / "eval.jsonl").read_text().splitlines()]
    values = [line["value"] for line in evaluations]
    assert (summary["eval_first"], summary["eval_last"], summary["eval_best"]) == (values[0], values[-1], max(values))
    assert (summary["state"], summary["steps"], summary["metric"]) == ("finished", 64, "mean@4")
    assert (summary["lag_max"], summary["lag_bound"]) == (6, 8)
    assert summary["mismatch_max"] == pytest.approx(max(line["mismatch_max"] for line in evaluations))
    assert summary["truncation_rate"] == pytest.approx(0.03)  # 32 steps at .02, 32 at .04, all of 32 groups
    assert summary["prompts_issued"] == 32 * 64 + 40
    assert summary["prompts_dropped"] == {"zero variance": 256}
    assert summary["tokens_generated"] == 140800
    assert summary["wall_s"] == pytest.approx(38.4)
    fit = summary["fit"]
    assert set(fit) >= {"law", "A", "B", "C_mid", "R0", "interval"}
    assert fit["R0"] == values[0]
    assert fit["interval"]["A"][0] <= 0.9 <= fit["interval"]["A"][1]
    assert summary["forecast_error"] < 0.02


def test_truncation_rate_weighs_steps_by_their_groups(run_dir):
    (run_dir / "metrics.jsonl").write_text(
        '{"step": 1, "truncation_rate": 0.5, "groups": 10}\n{"step": 2, "truncation_rate": 0.0, "groups": 30}\n'
    )
    (run_dir / "eval.jsonl").unlink()
    assert summarise(run_dir)["truncation_rate"] == pytest.approx(0.125)


def test_run_that_has_only_started(run_dir):
    for name in ("metrics.jsonl", "eval.jsonl", "samples.jsonl", "environment.json"):
        (run_dir / name).unlink()
    (run_dir / "state.json").write_text('{"state": "running", "step": 0, "steps": 64}')
    summary = strict(summarise(run_dir))
    assert set(summary) >= WANTED
    assert summary["state"] == "running"
    assert summary["steps"] == 0
    assert summary["fit"] is None
    assert "0 points" in summary["fit_reason"]
    assert summary["eval_last"] is None


def test_numbers_that_are_not_finite_do_not_reach_the_summary(run_dir):
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "wall_s": 2.0, "lag_max": NaN}\n{"step": 2, "wall_s": NaN}\n')
    (run_dir / "eval.jsonl").write_text(
        '{"step": 0, "metric": "mean@4", "value": NaN, "flops": 0, "mismatch_max": 0.25}\n'
        '{"step": 1, "metric": "mean@4", "value": NaN, "flops": 1, "mismatch_max": Infinity}\n'
    )
    summary = strict(summarise(run_dir))
    assert summary["mismatch_max"] == 0.25
    assert summary["lag_max"] is None
    assert summary["wall_s"] is None
    assert summary["eval_first"] is None
    assert "no value at step 0" in summary["fit_reason"]


def test_fit_file_is_strict_json_with_every_axis(reported_run):
    stored = json.loads((reported_run / "fit.json").read_text(), parse_constant=pytest.fail)
    assert set(stored["axes"]) == {"flops", "tokens", "device_seconds"}
    assert stored["fit"] == stored["axes"]["flops"]["fit"]
    assert stored["axes"]["tokens"]["fit"]["A"] == pytest.approx(stored["fit"]["A"], rel=1e-6)
    assert stored["axes"]["tokens"]["fit"]["C_mid"] == pytest.approx(stored["fit"]["C_mid"] * 2200 / 3e9, rel=1e-6)
    assert len(stored["axes"]["flops"]["held_out"]["predicted"]) == 16


def test_the_sources_of_a_mixture_are_fitted_apart(mixture_dir):
    stored = fit_run(mixture_dir)
    assert stored == json.loads((mixture_dir / "fit.json").read_text())
    summary = strict(summarise(mixture_dir))
    for name, A, middle in (("sums", 0.95, 12.0), ("tokens", 0.75, 20.0)):
        found = summary["sources"][name]
        assert found["fit"]["A"] == pytest.approx(A, abs=0.04)
        assert found["fit"]["C_mid"] == pytest.approx(3e9 * middle, rel=0.15)
        assert found["forecast_error"] == stored["sources"][name]["forecast_error"] < 0.02
        assert found["eval_first"] == pytest.approx(0.3, abs=0.02)
        assert found["eval_last"] > 0.6
    # The mean of the two is neither.
    assert summary["sources"]["tokens"]["fit"]["A"] < summary["fit"]["A"] < summary["sources"]["sums"]["fit"]["A"]


def test_a_fit_of_fewer_evaluations_is_not_taken_for_todays(run_dir):
    path = run_dir / "eval.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:3]) + "\n")
    assert fit_run(run_dir)["fit"] is None
    assert summarise(run_dir)["fit"] is None
    path.write_text("\n".join(lines) + "\n")
    assert summarise(run_dir)["fit"]["A"] == pytest.approx(0.9, abs=0.06)


def test_a_damaged_fit_file_is_made_again(run_dir):
    (run_dir / "eval.jsonl").write_text('{"step": 0, "metric": "mean@4", "value": 0.5, "flops": 0}\n')
    (run_dir / "fit.json").write_text('{"fit": {"A"')
    assert "points at positive compute" in summarise(run_dir)["fit_reason"]
