"""Curves: what is refused."""

import ast
from pathlib import Path

import numpy as np
import pytest

import jaxrl_llm.scaling
from jaxrl_llm.scaling.curves import Curve, curve_of_points
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
