"""Curves from tables, Weights & Biases exports and run directories: what is read, and what is refused by name."""

import json

import numpy as np
import pytest

from jaxrl_llm.scaling.files import read_table
from jaxrl_llm.scaling.sources import MOST_POINTS, read_curve, read_curves
from jaxrl_llm.types import UserError


def write(tmp_path, name, content):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


POINTS = [(0.0, 0.3), (1000.0, 0.4), (2000.0, 0.5)]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "step,compute,reward\n0,0,.3\n1,1e3,0.4\n2,2e3,0.5\n"),
        ("a.csv", "\ufeffcompute,reward\r\n0,.3\r\n1000,0.4\r\n\r\n2000,0.5\r\n"),
        ("a.csv", "compute,reward\n0,.3\n1000,.4\n2000,.5".encode("utf-16")),
        ("a.csv", '"compute"; "reward"\n0;.3\n1000;.4\n2000;.5\n'),
        ("a.tsv", "compute\treward\n0\t.3\n1000\t.4\n2000\t.5\n"),
        ("a.csv", 'compute,reward,note\n0,.3,"first,\nof all"\n1000,.4,\n2000,.5,\n'),
        (
            "a.jsonl",
            '{"compute": 0, "reward": 0.3}\n\n{"compute": "1e3", "reward": 0.4}\n{"compute": 2000, "reward": 0.5}',
        ),
        ("a.json", [{"compute": c, "reward": r} for c, r in POINTS]),
        ("a.json", {"compute": [c for c, _ in POINTS], "reward": [r for _, r in POINTS]}),
        ("a.json", {k: {str(i): p[j] for i, p in enumerate(POINTS)} for j, k in enumerate(("compute", "reward"))}),
        ("a.json", "\n".join(json.dumps({"compute": c, "reward": r}) for c, r in POINTS)),
    ],
)
def test_tables_of_all_kinds_give_the_same_curve(tmp_path, name, content):
    curve = read_curve(write(tmp_path, name, content))
    assert list(zip(curve.compute, curve.reward, strict=True)) == POINTS


def test_named_columns_and_groups(tmp_path):
    path = write(
        tmp_path, "a.csv", "run,seed,hours,acc\nb,0,1,.2\na,0,1,.1\nb,0,2,.4\na,0,2,.3\nb,1,1,.25\nb,1,2,.45\n"
    )
    found = read_curves(path, x="hours", y="acc", group="run,seed")
    assert [c.name for c in found] == ["b/0", "a/0", "b/1"]
    assert [c.curve.reward.tolist() for c in found] == [[0.2, 0.4], [0.1, 0.3], [0.25, 0.45]]
    assert found[1].places == ("line 3", "line 5")
    with pytest.raises(UserError, match=r"a\.csv \(b\) line 6: hours falls from 2 to 1"):
        read_curves(path, x="hours", y="acc", group="run")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "compute,rewards\n1,2\n", r"no column 'reward', only compute, rewards; did you mean 'rewards'\?"),
        ("a.csv", "C,R\n1,2\n", "no column 'compute', only C, R; name the columns"),
        ("a.csv", "compute,reward,reward\n1,2,3\n", "2 columns 'reward'"),
        ("a.csv", "compute,reward\n1,0.5\n2,high\n", "a.csv line 3: reward is 'high', which is not a number"),
        ("a.csv", "compute,reward\n1,nan\n", "a.csv line 2: reward is 'nan'"),
        ("a.csv", "compute,reward\n1,-inf\n", "a.csv line 2: reward is '-inf'"),
        ("a.csv", "compute,reward\n1,\n", "line 2: reward is ''"),
        ("a.csv", "compute,reward\n1_000,.5\n", "line 2: compute is '1_000'"),
        ("a.csv", "compute,reward\n1\n", "line 2 has fewer fields"),
        ("a.csv", "compute,reward\n1,.5,9\n", "line 2 has more fields"),
        ("a.csv", 'compute,reward\n1,".5\n', "line 2 is not CSV"),
        ("a.csv", "compute,reward\n-1,.5\n1,.6\n", "line 2: compute is -1; it cannot be negative"),
        ("a.csv", "compute,reward\n1,.5\n3,.6\n2,.7\n", "line 4: compute falls from 3 to 2 .*--group"),
        ("a.csv", "compute,reward\n1,.5\n2,.6\n2,.7\n", "line 4: compute repeats 2"),
        ("a.csv", "compute,reward\n", "holds no points, only column names"),
        ("a.csv", "", "is empty"),
        ("a.csv", "\ufeff\n\n", "is empty"),
        ("a.csv", b"\xff\xfe\x00\xd8", "not a text file"),
        ("a.csv", b"\x89PNG\r\n\x1a\n\x00\x00", "not a text file"),
        ("a.csv", "compute,reward\n1,.\0005\n", "line 2"),
        ("a.jsonl", '{"compute": 1, "reward": 0.5}\n{"compute": 2,', "line 2 is not JSON"),
        ("a.jsonl", "[1, 2]\n", "line 1 is not an object"),
        ("a.jsonl", '{"compute": true, "reward": 0.5}\n', "line 1: compute is True"),
        ("a.jsonl", '{"compute": 1, "reward": NaN}\n', "line 1: reward is nan"),
        ("a.jsonl", '{"compute": 1, "reward": 0.5}\n{"compute": 2}\n', "line 2: reward is missing"),
        ("a.jsonl", '{"compute": 1, "reward": %s}\n' % ("9" * 400), "line 1: reward is 999"),
        ("a.json", "[1, 2]", "neither a list of objects"),
        ("a.json", "{]", "is not JSON"),
        ("a.json", "[" * 100000, "is not JSON"),
    ],
)
def test_a_bad_file_is_refused_by_line(tmp_path, name, content, message):
    with pytest.raises(UserError, match=message) as caught:
        read_curves(write(tmp_path, name, content))
    assert name in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_missing_and_a_huge_file_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"none\.csv does not exist"):
        read_curves(tmp_path / "none.csv")
    with (tmp_path / "huge.csv").open("wb") as file:
        file.truncate(2**28 + 1)
    with pytest.raises(UserError, match="has 256 MiB, more than"):
        read_curves(tmp_path / "huge.csv")
    with pytest.raises(UserError, match="is no run directory and holds no TensorBoard event files"):
        read_curves(tmp_path)


def test_runs_mixed_in_one_file_are_refused_though_their_compute_is_sorted(tmp_path):
    path = write(tmp_path, "a.csv", "seed,compute,reward\n" + "".join(f"{k % 2},{k},{k / 10}\n" for k in range(8)))
    with pytest.raises(UserError, match=r"several runs: seed is 0, 1; .*--group seed"):
        read_curves(path)
    assert [len(c.curve) for c in read_curves(path, group="seed")] == [4, 4]


def test_a_row_without_a_group_is_named(tmp_path):
    path = write(tmp_path, "a.csv", "run,compute,reward\na,1,.1\n,2,.2\n")
    with pytest.raises(UserError, match=r"a\.csv line 3 has no run, so it belongs to no group"):
        read_curves(path, group="run")


def test_a_column_that_only_labels_the_rows_is_no_group(tmp_path):
    path = write(tmp_path, "a.csv", "name,compute,reward\n" + "".join(f"step{k},{k},{k / 10}\n" for k in range(8)))
    assert len(read_curve(path)) == 8


def test_a_reward_outside_the_bounds_is_named_by_its_line(tmp_path):
    (found,) = read_curves(write(tmp_path, "a.csv", "compute,reward\n1,.5\n2,60\n3,70\n"))
    with pytest.raises(UserError, match=r"a\.csv line 3: reward is 60, outside \[0, 1\] \(2 such points\)"):
        found.check_bounds(0.0, 1.0)
    found.check_bounds(0.0, 100.0)
    for lower, upper in ((1.0, 0.0), (0.0, float("nan"))):
        with pytest.raises(UserError, match="not a lower and a higher number"):
            found.check_bounds(lower, upper)


def test_a_long_curve_is_averaged_with_a_warning(tmp_path):
    count = 3 * MOST_POINTS
    path = write(tmp_path, "a.csv", "compute,reward\n" + "".join(f"{k},{k / count}\n" for k in range(1, count + 1)))
    (found,) = read_curves(path)
    assert len(found.curve) == MOST_POINTS
    assert found.curve.compute[0] == 2.0  # of 1, 2, 3
    np.testing.assert_allclose(found.curve.reward, found.curve.compute / count)
    assert "1536 points are more than 512" in found.warnings[0]


CHART = (
    '"Step","a - x - eval/acc","a - x - eval/acc__MIN","a - x - eval/acc__MAX",'
    '"b - eval/acc","b - eval/acc__MIN","b - eval/acc__MAX"\n'
    '"1","0.1","0.1","0.1","","",""\n'
    '"2","0.2","0.1","0.3","0.5","0.5","0.5"\n'
    '"3","","","","0.6","0.6","0.6"\n'
)


def test_chart_export_of_weights_and_biases(tmp_path):
    found = read_curves(write(tmp_path, "wandb.csv", CHART))
    assert [(c.name, c.x, c.y) for c in found] == [("a - x", "Step", "eval/acc"), ("b", "Step", "eval/acc")]
    assert [c.curve.compute.tolist() for c in found] == [[1.0, 2.0], [2.0, 3.0]]
    assert [c.curve.reward.tolist() for c in found] == [[0.1, 0.2], [0.5, 0.6]]
    assert all("count of steps" in c.warnings[0] for c in found)
    assert [len(c.warnings) for c in found] == [2, 1]
    assert "1 points are averages" in found[0].warnings[1]


def test_chart_export_with_a_metric_as_the_axis(tmp_path):
    columns = [f"r - {metric}{end}" for metric in ("flops", "acc") for end in ("", "__MIN", "__MAX")]
    path = write(tmp_path, "w.csv", "Step," + ",".join(columns) + "\n1,10,10,10,.1,.1,.1\n2,30,30,30,.2,.2,.2\n")
    (found,) = read_curves(path, x="flops")
    assert (found.curve.compute.tolist(), found.warnings) == ([10.0, 30.0], ())
    with pytest.raises(UserError, match="several metrics; choose one with --y: flops, acc"):
        read_curves(path)
    with pytest.raises(UserError, match="no metric 'loss', only flops, acc"):
        read_curves(path, y="loss")
    with pytest.raises(UserError, match="no x axis 'hours', only Step, flops"):
        read_curves(path, x="hours", y="acc")


def test_chart_export_with_nan_is_refused_by_line(tmp_path):
    with pytest.raises(UserError, match=r"line 4: b - eval/acc is 'NaN'"):
        read_curves(write(tmp_path, "w.csv", CHART.replace('"0.6","0.6","0.6"', '"NaN","NaN","NaN"')))


def test_history_of_weights_and_biases_has_gaps(tmp_path):
    rows = [{"_step": k, "loss": 1.0, **({"acc": 0.1 * k, "flops": 5.0 * k} if k % 2 else {})} for k in range(8)]
    path = write(tmp_path, "h.json", rows)
    (found,) = read_curves(path, y="acc")
    assert found.curve.compute.tolist() == [1.0, 3.0, 5.0, 7.0]
    assert "count of steps" in found.warnings[0]
    (found,) = read_curves(path, x="flops", y="acc")
    assert (found.curve.compute.tolist(), found.warnings) == ([5.0, 15.0, 25.0, 35.0], ())
    table = write(tmp_path, "h.csv", "_step,acc,flops\n0,,\n1,.1,\n")
    with pytest.raises(UserError, match=r"h\.csv line 3: flops is ''"):
        read_curves(table, x="flops", y="acc")


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def test_a_run_directory_with_a_resumed_step_and_an_unfinished_line(tmp_path):
    run = tmp_path / "run1"
    run.mkdir()
    first = [{"step": k, "flops": 10.0 * k, "tokens": 5 * k, "value": 0.1 * k} for k in range(4)]
    again = [{"step": k, "flops": 10.0 * k, "tokens": 5 * k, "value": 0.1 * k + 0.05} for k in (2, 3)]
    (run / "eval.jsonl").write_text(lines(*first, *again) + '{"step": 4, "flo')
    (found,) = read_curves(run)
    assert (found.name, found.warnings) == ("run1", ())
    assert found.curve.compute.tolist() == [0.0, 10.0, 20.0, 30.0]
    np.testing.assert_allclose(found.curve.reward, [0.0, 0.1, 0.25, 0.35])
    assert read_curve(run, x="tokens").compute.tolist() == [0.0, 5.0, 10.0, 15.0]
    with pytest.raises(UserError, match="no key 'hours', only step, flops, tokens, value"):
        read_curves(run, x="hours")
    with pytest.raises(UserError, match="no column 'run'; --group is for tables"):
        read_curves(run, group="run")
    (run / "eval.jsonl").write_text(lines(*first, {"step": 4, "flops": None, "value": 0.5}))
    with pytest.raises(UserError, match="step 4: flops is missing"):
        read_curves(run)
    (run / "eval.jsonl").write_text("")
    with pytest.raises(UserError, match="no evaluations yet"):
        read_curves(run)


def test_a_mixture_has_a_curve_for_all_and_one_for_each_source(tmp_path):
    run = tmp_path / "both"
    run.mkdir()
    records = [
        {"step": k, "flops": 2.0 * k, "value": 0.15 * k, "value/sums": 0.1 * k, "value/code": 0.2 * k} for k in range(4)
    ]
    (run / "eval.jsonl").write_text(lines(*records))
    found = read_curves(run, by_source=True)
    assert [(c.name, c.y) for c in found] == [
        ("both", "value"),
        ("both/sums", "value/sums"),
        ("both/code", "value/code"),
    ]
    for curve, slope in zip(found, (0.15, 0.1, 0.2), strict=True):
        np.testing.assert_allclose(curve.curve.reward, slope * np.arange(4))
        np.testing.assert_array_equal(curve.curve.compute, [0.0, 2.0, 4.0, 6.0])
    assert [c.y for c in read_curves(run, y="value/code", by_source=True)] == ["value/code"]
    assert [c.name for c in read_curves(run)] == ["both"]  # a comparison of runs is one of their whole mixtures
    (run / "eval.jsonl").write_text(lines(*records[:3], {**records[3], "value/code": None}))
    with pytest.raises(UserError, match="step 3: value/code is missing"):
        read_curves(run, by_source=True)
    assert len(read_curve(run)) == 4


def test_several_curves_are_not_one(tmp_path):
    with pytest.raises(UserError, match="holds 2 curves"):
        read_curve(write(tmp_path, "wandb.csv", CHART))


def test_columns_of_a_table(tmp_path):
    table = read_table(write(tmp_path, "a.csv", "N,D,loss\n1e9,2e10,2.5\n2e9,4e10,2.3\n"))
    assert table.columns == ("N", "D", "loss")
    assert table.numbers("N").tolist() == [1e9, 2e9]
