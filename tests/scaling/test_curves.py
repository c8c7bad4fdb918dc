"""Curves: what is refused, and reading them from files."""

import ast
from pathlib import Path

import numpy as np
import pytest

import jaxrl_llm.scaling
from jaxrl_llm.scaling.curves import Curve, curve_of_points, read_curve
from jaxrl_llm.types import RunPoint, UserError


@pytest.mark.parametrize(
    ("compute", "reward", "message"),
    [
        ([1, 2, 3], [0.1, np.nan, 0.3], "reward is nan at point 2"),
        ([1, np.inf, 3], [0.1, 0.2, 0.3], "compute is inf at point 2"),
        ([1, 3, 2], [0.1, 0.2, 0.3], "compute falls from 3 to 2 at point 3"),
        ([1, 2, 2], [0.1, 0.2, 0.3], "compute repeats 2 at point 3"),
        ([-1, 2, 3], [0.1, 0.2, 0.3], "compute is -1 at point 1"),
        ([1, 2], [0.1, 0.2, 0.3], "equally long"),
    ],
)
def test_a_bad_curve_is_refused(compute, reward, message):
    with pytest.raises(UserError, match=message):
        Curve(np.array(compute, float), np.array(reward, float))


def test_axes_of_a_run():
    points = [RunPoint(0, 0.0, 0, 0.0, 0.1), RunPoint(5, 2e9, 300, 1.5, 0.4)]
    assert curve_of_points(points).compute.tolist() == [0.0, 2e9]
    assert curve_of_points(points, "tokens").compute.tolist() == [0.0, 300.0]
    assert curve_of_points(points, "device_seconds").compute.tolist() == [0.0, 1.5]
    assert curve_of_points(points).zero == 0.1
    with pytest.raises(UserError, match="unknown compute axis 'hours'"):
        curve_of_points(points, "hours")


def test_csv_and_jsonl(tmp_path):
    table = tmp_path / "a.csv"
    table.write_text("step,compute,reward\n0,0,.3\n1,1e3,0.4\n2,2e3,0.5\n")
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"hours": 0, "acc": 0.3}\n\n{"hours": 1000, "acc": 0.4}\n{"hours": 2000, "acc": 0.5}\n')
    for curve in (read_curve(table), read_curve(lines, x="hours", y="acc")):
        assert curve.compute.tolist() == [0.0, 1000.0, 2000.0]
        assert curve.reward.tolist() == [0.3, 0.4, 0.5]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "compute,rewards\n1,2\n", "no column 'reward', only compute, rewards; did you mean 'rewards'"),
        ("a.csv", "compute,reward\n1,0.5\n2,high\n", "line 3: reward is 'high', which is not a number"),
        ("a.csv", "compute,reward\n1,nan\n", "line 2: reward is 'nan'"),
        ("a.csv", "compute,reward\n1,\n", "line 2: reward is ''"),
        ("a.csv", "compute,reward\n1\n", "line 2: reward is None"),
        ("a.csv", "compute,reward\n1,.5,9\n", "line 2 has more fields"),
        ("a.csv", "compute,reward\n2,.5\n1,.6\n", "a.csv: compute falls from 2 to 1"),
        ("a.csv", "compute,reward\n", "holds no points"),
        ("a.csv", "", "holds no points"),
        ("a.jsonl", '{"compute": 1, "reward": 0.5}\n{"compute": 2,', "line 2 is not JSON"),
        ("a.jsonl", "[1, 2]\n", "line 1 is not an object"),
        ("a.jsonl", '{"compute": true, "reward": 0.5}\n', "compute is True"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_curve(path)


def test_a_missing_or_binary_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="no curve file"):
        read_curve(tmp_path / "none.csv")
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00\xd8")
    with pytest.raises(UserError, match="not a text file"):
        read_curve(tmp_path / "b.csv")


def test_scaling_stands_alone():
    """The room is of use to somebody with only a CSV: nothing of the package but types, no other library."""
    allowed = {"jax", "numpy", "scipy", "matplotlib"}
    for file in Path(jaxrl_llm.scaling.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                names = [node.module]
            else:
                continue
            for name in names:
                ours = name == "jaxrl_llm.types" or name == "jaxrl_llm.scaling" or name.startswith("jaxrl_llm.scaling.")
                root = name.split(".")[0]
                assert ours or root in allowed or root in __import__("sys").stdlib_module_names, (file.name, name)
