"""Every notebook runs from top to bottom, shows what its cells end with, and is stored without outputs."""

import ast
import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def cells(name):
    notebook = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    return notebook["cells"]


def run(source, name, namespace):
    """Execute a cell as IPython would and return the value of its last expression, which a notebook displays."""
    tree = ast.parse(source, filename=name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), namespace)
    return None if last is None else eval(compile(ast.Expression(last.value), name, "eval"), namespace)


# What each notebook shows: printed words, and how many figures.
EXPECTED = {
    "scalerl_forecast": (("A by block bootstrap", "first 0.125:", "published protocol: A = ", "power law"), 2),
    "recipe_comparison": (("higher has the higher ceiling", "base is more efficient", "stop: ", "gspo"), 1),
    "isocompute_planning": (("stable: {32: True, 64: False}", "n = 128", "TPU v5e hours"), 1),
    "pretraining_laws": (("tokens per parameter", "planted 0.076", "1e+22 FLOPs: 32B"), 1),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_notebook_runs(name, monkeypatch, capsys):
    monkeypatch.chdir(NOTEBOOKS)
    namespace = {"__name__": "__main__"}
    figures = 0
    for index, cell in enumerate(cells(name)):
        if cell["cell_type"] != "code":
            continue
        assert (cell["outputs"], cell["execution_count"]) == ([], None)
        shown = run("".join(cell["source"]), f"{name}, cell {index}", namespace)
        if isinstance(shown, Figure):
            figures += 1
            assert shown._repr_png_().startswith(b"\x89PNG")
    words, count = EXPECTED[name]
    out = capsys.readouterr().out
    for text in words:
        assert text in out
    assert figures == count


def test_every_notebook_is_run():
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(EXPECTED)
