"""`jaxrl fit`, `compare` and `plan` on real files, through the command line."""

import json

import numpy as np
import pytest
from tensorboardX import SummaryWriter

from jaxrl_llm.scaling import chinchilla
from jaxrl_llm.scaling.laws import sigmoid

COMPUTE = np.linspace(500.0, 15000.0, 30)
PLANTED = {"A": 0.61, "B": 1.92, "C_mid": 2542.0, "R0": 0.35}


def rewards(noise=0.004, seed=0, **law):
    return sigmoid(COMPUTE, **{**PLANTED, **law}) + noise * np.random.default_rng(seed).normal(size=30)


def write(path, columns):
    rows = zip(*columns.values(), strict=True)
    path.write_text(",".join(columns) + "\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    return path


@pytest.fixture
def curve(tmp_path):
    return write(tmp_path / "curve.csv", {"compute": COMPUTE, "reward": rewards()})


@pytest.fixture
def recipes(tmp_path):
    columns = {"recipe": [], "seed": [], "compute": [], "reward": []}
    for index, (name, A, count) in enumerate([("base", 0.61, 30), ("high", 0.70, 30), ("poor", 0.5, 20)]):
        for seed in (0, 1):
            columns["recipe"] += [name] * count
            columns["seed"] += [seed] * count
            columns["compute"] += COMPUTE[:count].tolist()
            columns["reward"] += rewards(seed=2 * index + seed, A=A)[:count].tolist()
    return write(tmp_path / "recipes.csv", columns)


def objects(text):
    return [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in text.splitlines()]


def test_fit_as_a_table_and_as_a_figure(curve, jaxrl):
    plot = curve.parent / "curve.svg"
    status, out, err = jaxrl("fit", curve, "--upto", "50%", "--at", "30000", "--plot", plot)
    assert (status, err) == (0, "")
    assert out.startswith("curve: sigmoid, 15 points up to compute 7500\n  A = ")
    for text in (
        "(95%: ",
        "held out: 15 points, mean absolute error",
        "at compute 3e+04: ",
        "first part of 0.125: no fit",
    ):
        assert text in out
    assert b"<svg" in plot.read_bytes()


def test_fit_as_json_lines(curve, recipes, jaxrl):
    status, out, _ = jaxrl("fit", recipes, "--group", "recipe,seed", "--json", "-")
    found = objects(out)
    assert status == 0
    assert [one["curve"] for one in found] == ["base/0", "base/1", "high/0", "high/1", "poor/0", "poor/1"]
    for one in found:
        assert set(one["params"]) == {"A", "B", "C_mid", "R0"}
        low, high = one["intervals"]["A"]
        assert low < one["params"]["A"] < high
        assert len(one["residuals"]) == len(one["compute"])
        assert {"law", "predictions", "warnings"} <= set(one)
    assert found[2]["params"]["A"] == pytest.approx(0.70, abs=0.02)
    out_file = curve.parent / "fit.jsonl"
    status, out, _ = jaxrl("fit", curve, "--fix", "R0=0.35", "--fix", "A=0.61", "--json", out_file)
    (one,) = objects(out_file.read_text())
    assert (status, one["params"]["A"], one["params"]["R0"]) == (0, 0.61, 0.35)
    assert set(one["fixed"]) == {"A", "R0"}
    assert "A = 0.61 (fixed)" in out


def test_fit_of_other_laws(curve, jaxrl):
    status, out, _ = jaxrl("fit", curve, "--law", "power_law", "--json", "-")
    assert (status, set(objects(out)[0]["params"])) == (0, {"A", "B", "D"})
    status, out, _ = jaxrl("fit", curve, "--protocol", "published", "--fix", "R0=0.35")
    assert status == 0
    assert "published protocol, 28 points" in out  # those from 1,500 GPU-hours on
    N = np.geomspace(1e6, 1e9, 10)
    table = write(curve.parent / "kaplan.csv", {"params": N, "loss": (8.8e13 / N) ** 0.076})
    status, out, _ = jaxrl("fit", table, "--law", "kaplan_N", "--x", "params", "--at", "1e10", "--json", "-")
    (one,) = objects(out)
    assert one["params"]["alpha"] == pytest.approx(0.076, rel=1e-6)
    assert one["predictions"][0]["predicted"] == pytest.approx((8.8e13 / 1e10) ** 0.076, rel=1e-6)
    status, out, _ = jaxrl("fit", table, "--law", "kaplan_N", "--x", "params", "--at", "1e10")
    assert "kaplan: kaplan_N, 10 points" in out
    assert "at N 1e+10: 1.994" in out


def test_fit_reads_logs_and_runs(tmp_path, jaxrl):
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    lines = [{"step": k, "flops": c, "value": r} for k, (c, r) in enumerate(zip(COMPUTE, rewards(), strict=True))]
    (run / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    log = tmp_path / "tb"
    writer = SummaryWriter(str(log))
    chart = {"flops": COMPUTE, "mine - acc": rewards(), "mine - acc__MIN": rewards(), "mine - acc__MAX": rewards()}
    for line in lines:
        writer.add_scalar("acc", line["value"], line["step"])
        writer.add_scalar("compute", line["flops"], line["step"])
    writer.close()
    write(tmp_path / "wandb.csv", chart)
    fits = []
    for source, options in ((run, ()), (log, ("--y", "acc")), (tmp_path / "wandb.csv", ())):
        status, out, err = jaxrl("fit", source, *options, "--json", "-")
        assert status == 0, err
        fits.append(objects(out)[0])
    assert [one["x"] for one in fits] == ["flops", "compute", "flops"]
    assert [one["curve"] for one in fits] == ["mine", "tb", "mine"]
    A = [one["params"]["A"] for one in fits]
    np.testing.assert_allclose(A, A[0], rtol=1e-5)  # TensorBoard keeps float32
    # Two curves of one name keep apart.
    status, out, _ = jaxrl("fit", run, tmp_path / "wandb.csv", "--json", "-")
    assert [one["curve"] for one in objects(out)] == [f"{run}:mine", f"{tmp_path / 'wandb.csv'}:mine"]


def test_fit_of_a_mixtures_run_fits_each_source_apart(tmp_path, jaxrl):
    planted = {"sums": {"A": 0.9, "C_mid": 2500.0}, "code": {"A": 0.7, "C_mid": 5000.0}}
    apart = {name: rewards(0.002, seed, **law) for seed, (name, law) in enumerate(planted.items())}
    run = tmp_path / "both"
    run.mkdir()
    keys = ("value/sums", "value/code", "value")
    values = [*apart.values(), np.mean(list(apart.values()), axis=0)]
    records = [
        {"step": k, "flops": c} | dict(zip(keys, row, strict=True))
        for k, (c, *row) in enumerate(zip(COMPUTE, *values, strict=True))
    ]
    (run / "eval.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    plot = tmp_path / "both.svg"
    status, out, err = jaxrl("fit", run, "--json", "-", "--plot", plot)
    assert status == 0, err
    all_, *found = objects(out)
    assert (all_["curve"], all_["y"]) == ("both", "value")
    for one, (name, law) in zip(found, planted.items(), strict=True):
        assert (one["curve"], one["y"]) == (f"both/{name}", f"value/{name}")
        low, high = one["intervals"]["A"]
        assert low < law["A"] < high
        assert one["params"]["A"] == pytest.approx(law["A"], abs=0.02)
        assert one["params"]["C_mid"] == pytest.approx(law["C_mid"], rel=0.1)
    assert all(name in plot.read_text() for name in ("both/sums", "both/code"))
    assert jaxrl("fit", run, "--y", "value/code")[1].startswith("both: sigmoid, 30 points")


def test_fit_prints_the_good_curves_and_fails_for_the_bad_one(curve, jaxrl):
    flat = write(curve.parent / "flat.csv", {"compute": COMPUTE, "reward": np.full(30, 0.5)})
    status, out, err = jaxrl("fit", curve, flat, "--json", "-")
    good, bad = objects(out)
    assert status == 2
    assert good["params"] is not None
    assert (bad["params"], bad["curve"]) == (None, "flat")
    assert "0.5 at every point" in bad["error"]
    assert err.startswith("error: flat could not be fitted")
    status, out, err = jaxrl("fit", flat)
    assert status == 2
    assert "no fit: the reward is 0.5 at every point" in out


def test_a_number_that_the_data_does_not_tell_is_not_printed(tmp_path, jaxrl):
    compute = np.linspace(50.0, 1500.0, 30)
    noise = 0.002 * np.random.default_rng(0).normal(size=30)
    path = write(tmp_path / "early.csv", {"compute": compute, "reward": sigmoid(compute, **PLANTED) + noise})
    status, out, _ = jaxrl("fit", path)
    assert status == 0
    assert "A is not determined: " in out
    assert "not determined, for A is not" in out
    assert "warning: " in out
    assert "A = " not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.csv"], "none.csv does not exist"),
        (["curve.csv", "--law", "sigmoyd"], "unknown law 'sigmoyd'"),
        (["curve.csv", "--x", "hours"], "no column 'hours', only compute, reward"),
        (["curve.csv", "--group", "run"], "no column 'run'"),
        (["curve.csv", "--upto", "half"], "--upto half is neither a compute"),
        (["curve.csv", "--upto", "150%"], "--upto 150% is neither"),
        (["curve.csv", "--upto", "-5"], "up to compute -5 are none"),
        (["curve.csv", "--fix", "A"], "--fix A is no NAME=NUMBER"),
        (["curve.csv", "--fix", "A=high"], "--fix A=high is no NAME=NUMBER"),
        (["curve.csv", "--fix", "D=1"], "sigmoid has no parameter 'D'"),
        (["curve.csv", "--upper", "0.5"], r"curve.csv line 7: reward is 0.50"),
        (["curve.csv", "--plot", "a.gif"], "ends in .gif"),
        (["curve.csv", "--json", "none/a.jsonl"], "cannot be written"),
        (["curve.csv", "--protocol", "mine"], "unknown protocol"),
        (["curve.csv", "curve.csv"], "is given twice"),
        (["curve.csv", "--law", "tan_line", "--plot", "a.png"], "--plot draws rewards over compute"),
        (["curve.csv", "--law", "chinchilla"], "no column 'N'"),
        (["mixed.csv"], "several runs: run is a, b"),
        (["two.csv"], "2 points are too few"),
        (["above.csv"], "above.csv line 32: reward is 1.5, outside"),
    ],
)
def test_fit_refuses_by_name(curve, jaxrl, monkeypatch, arguments, message):
    folder = curve.parent
    monkeypatch.chdir(folder)
    write(folder / "mixed.csv", {"run": ["a", "b"] * 15, "compute": COMPUTE, "reward": rewards()})
    write(folder / "two.csv", {"compute": COMPUTE[:2], "reward": rewards()[:2]})
    write(folder / "above.csv", {"compute": [*COMPUTE, 2e4], "reward": [*rewards(), 1.5]})
    status, out, err = jaxrl("fit", *arguments)
    assert status == 2
    assert err.count("\n") == 1
    assert message in err
    assert "A = " not in out


def test_compare_recipes_of_a_table(recipes, jaxrl):
    plot = recipes.parent / "compare.png"
    written = recipes.parent / "compare.json"
    options = ("--group", "recipe", "--seed", "seed", "--plot", plot, "--json", written)
    status, out, err = jaxrl("compare", recipes, *options)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split()[:3] == ["recipe", "seeds", "A"]
    assert [line.split()[:2] for line in lines[1:4]] == [["base", "2"], ["high", "2"], ["poor", "2"]]
    assert "high has the higher ceiling (confidence over 99 %)" in out
    assert "base has the higher ceiling" in out
    assert "poor/0: stop: at compute 1.5e+04" in out
    assert plot.read_bytes().startswith(b"\x89PNG")
    (found,) = objects(written.read_text())
    assert [v["better"] for v in found["verdicts"]] == ["high", "base"]
    assert [one["action"] for one in found["stop_early"]] == ["stop", "stop"]
    assert found["leave_one_out"][1]["A_minus_reference"] == pytest.approx(0.09, abs=0.02)


def test_compare_named_files_whose_names_gather_seeds(curve, jaxrl):
    folder = curve.parent
    for name, A in (("b", 0.61), ("c", 0.7), ("d", 0.7)):
        write(folder / f"{name}.csv", {"compute": COMPUTE, "reward": rewards(seed=ord(name), A=A)})
    sources = [f"one={curve}", f"one={folder / 'b.csv'}", f"two={folder / 'c.csv'}", f"two={folder / 'd.csv'}"]
    status, out, err = jaxrl("compare", *sources, "--json", "-")
    assert status == 0, err
    (found,) = objects(out)
    assert [(row["recipe"], row["seeds"]) for row in found["leave_one_out"]] == [("one", 2), ("two", 2)]
    assert found["verdicts"][0]["better"] == "two"
    assert found["stop_early"] == []
    for arguments, message in (
        ([curve], "at least two recipes, got 1"),
        ([f"one={curve}", f"one={curve}", f"two={folder / 'c.csv'}"], "given twice for one"),
        ([curve, folder / "c.csv", "--seed", "seed"], "--group must name the column of recipes"),
        ([curve, folder / "c.csv", "--upper", "0.5"], "curve.csv line"),
    ):
        status, _, err = jaxrl("compare", *arguments)
        assert (status, err.count("\n")) == (2, 1)
        assert message in err


def test_plan_of_published_constants(jaxrl):
    status, out, _ = jaxrl("plan", "5.88e23", "--device", "TPU v5e", "--utilisation", "0.5")
    assert status == 0
    assert "N = 7.302e+10 parameters, D = 1.342e+12 tokens (18.4 for each parameter)" in out
    hours = 5.88e23 / (197e12 * 0.5) / 3600
    assert f"{hours:.4g} device-hours" in out
    status, out, _ = jaxrl("plan", "1e6", "--law", "isocompute", "--json", "-")
    (found,) = objects(out)
    assert (found["n"], found["B_p"], found["batch"]) == (128, 32, 4096)
    assert found["M"] == pytest.approx(1e6 / 4096)
    flops = ("--unit", "flops", "--params", "8e9", "--prompt-tokens", "500", "--completion-tokens", "4000")
    status, out, _ = jaxrl("plan", "1e21", "--law", "isocompute", *flops, "--peak", "1e15", "--json", "-")
    (found,) = objects(out)
    assert found["M"] * found["step_flops"]["total"] == pytest.approx(1e21)
    assert found["flops"] == pytest.approx(1e21)
    assert found["device_hours"] == pytest.approx(1e21 / 4e14 / 3600)
    status, out, _ = jaxrl("plan", "1e9", "--law", "isocompute", "--unit", "tokens", "--completion-tokens", "1000")
    assert "rollouts per prompt" in out


def test_plan_of_fitted_tables(tmp_path, jaxrl):
    N, D = (axis.ravel() for axis in np.meshgrid(np.geomspace(1e8, 1e10, 5), np.geomspace(2e9, 2e11, 5)))
    table = write(tmp_path / "c.csv", {"N": N, "D": D, "loss": chinchilla.loss(N, D, *chinchilla.PUBLISHED)})
    status, out, err = jaxrl("plan", "5.88e23", table, "--size", "70e9", "--json", "-")
    assert status == 0, err
    (found,) = objects(out)
    split = chinchilla.optimal_split(5.88e23, *chinchilla.PUBLISHED)
    assert found["N"] == pytest.approx(float(split.N), rel=1e-3)
    assert found["isoflop"][0]["N"] == 70e9
    rows = {"B_p": [], "n": [], "C": [], "reward": []}
    for index, n in enumerate((8, 16, 32, 64, 128)):
        C = np.geomspace(1e3, 1e6, 30)
        rows["B_p"] += [32] * 30
        rows["n"] += [n] * 30
        rows["C"] += C.tolist()
        rows["reward"] += sigmoid(C, 0.5 + 0.08 * index, 1.0, 4e3 * 3.2**index, 0.1).tolist()
    sweep = write(tmp_path / "sweep.csv", rows)
    status, out, err = jaxrl("plan", "1e5", sweep, "--law", "isocompute")
    assert status == 0, err
    assert "B_p = 32 prompts per step" in out
    assert "predicted reward" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["1e20", "--law", "sigmoid"], "no plan from 'sigmoid'"),
        (["0"], "a budget of 0 buys nothing"),
        (["nan"], "a budget of nan buys nothing"),
        (["1e20", "--law", "tan"], "give a table with N, X, loss"),
        (["1e20", "none.csv"], "no file none.csv"),
        (["1e6", "--law", "isocompute", "--unit", "hours"], "--unit hours is not"),
        (["1e6", "--law", "isocompute", "--unit", "flops"], "--params and --completion-tokens"),
        (["1e6", "--law", "isocompute", "--device", "TPU v5e"], "device-hours need FLOPs"),
        (["1e20", "--device", "abacus"], "no peak is known of a device 'abacus'"),
        (["1e20", "--device", "TPU v5e", "--utilisation", "40"], "utilisation is 40"),
        (["1e6", "--law", "isocompute", "--difficulty", "medium"], "difficulty is 'medium'"),
    ],
)
def test_plan_refuses_by_name(jaxrl, arguments, message):
    status, out, err = jaxrl("plan", *arguments)
    assert (status, err.count("\n")) == (2, 1)
    assert message in err
    assert out == ""
