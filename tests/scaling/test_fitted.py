"""One curve from a file with its fit: what is fitted and held out, JSON, figures, and laws of several columns."""

import json

import numpy as np
import pytest

from jaxrl_llm.scaling import chinchilla, tan
from jaxrl_llm.scaling.curves import Curve
from jaxrl_llm.scaling.fitted import finite, fit_curve
from jaxrl_llm.scaling.law_data import fit_law
from jaxrl_llm.scaling.laws import power_law, sigmoid
from jaxrl_llm.scaling.plots import fits_figure, save_figure
from jaxrl_llm.scaling.sources import NamedCurve
from jaxrl_llm.types import UserError

# 30 points everywhere: one compiled width.
COMPUTE = np.linspace(500.0, 15000.0, 30)
PLANTED = {"A": 0.61, "B": 1.92, "C_mid": 2542.0, "R0": 0.35}


def named(compute=COMPUTE, reward=None, *, noise=0.0, name="a", **law):
    if reward is None:
        reward = sigmoid(compute, **{**PLANTED, **law})
    reward = reward + noise * np.random.default_rng(0).normal(size=len(compute))
    return NamedCurve(name, name, "compute", "reward", Curve(compute, reward), tuple(map(str, range(len(compute)))))


@pytest.fixture(scope="module")
def half():
    return fit_curve(named(noise=0.005), upto=7500.0, at=[30000.0], resamples=200)


def test_a_noiseless_curve_gives_its_parameters_and_its_future():
    found = fit_curve(named(), resamples=20)
    np.testing.assert_allclose([found.fit.params[name] for name in PLANTED], list(PLANTED.values()), rtol=1e-6)
    assert [p.compute for p in found.predictions] == [30000.0, 60000.0]
    np.testing.assert_allclose(
        [p.predicted for p in found.predictions], sigmoid(np.array([3e4, 6e4]), **PLANTED), atol=1e-8
    )
    assert found.forecast_error is None
    assert [window.fraction for window in found.windows] == [1 / 8, 1 / 4, 1 / 2]
    assert found.windows[2].error < 1e-7


def test_points_beyond_upto_are_held_out_and_judged(half):
    assert (len(half.fitted), len(half.held_out)) == (15, 15)
    seen = [p for p in half.predictions if p.observed is not None]
    assert [p.compute for p in seen] == half.held_out.compute.tolist()
    assert half.forecast_error == pytest.approx(np.mean([abs(p.predicted - p.observed) for p in seen]))
    inside = np.mean([p.low <= p.observed <= p.high for p in seen])
    assert inside >= 0.8
    assert half.predictions[-1].compute == 30000.0
    assert half.predictions[-1].observed is None


def test_its_json_is_strict_and_whole(half):
    found = json.loads(json.dumps(half.describe(), allow_nan=False))
    assert set(found["params"]) == {"A", "B", "C_mid", "R0"}
    assert set(found["intervals"]) >= {"A", "B", "C_mid"}
    residuals = np.array(found["reward"]) - half.fit.predict(np.array(found["compute"]))
    np.testing.assert_allclose(found["residuals"], residuals, atol=1e-12)
    assert {"law", "predictions", "warnings", "windows", "undetermined", "error"} <= set(found)
    assert finite({"a": [float("nan"), 1.0, (float("inf"),)]}) == {"a": [None, 1.0, [None]]}


def test_a_curve_that_cannot_be_fitted_says_why():
    found = fit_curve(named(reward=np.full(30, 0.5)))
    assert (found.fit, found.predictions) == (None, ())
    described = json.loads(json.dumps(found.describe(), allow_nan=False))
    assert "0.5 at every point" in described["error"]
    assert described["params"] is None
    early = fit_curve(named(), upto=1200.0)
    assert "of 30 points those up to compute 1200 cannot be fitted: 2 points" in early.reason


def test_what_the_data_does_not_tell_is_named():
    compute = np.linspace(50.0, 1500.0, 30)
    found = fit_curve(named(compute, noise=0.002), resamples=50)
    assert "A" in found.fit.undetermined
    assert found.describe()["intervals"]["A"] is None
    assert found.warnings


def test_options_that_mean_nothing_are_refused():
    for options, message in (
        ({"law": "chinchilla"}, "no law of reward over compute"),
        ({"law": "sigmoidal"}, "unknown law 'sigmoidal'"),
        ({"protocol": "mine"}, "unknown protocol 'mine'"),
        ({"protocol": "published", "fixed": {"A": 0.6}}, "holds R0 alone"),
        ({"upto": -1.0}, "up to compute -1 are none"),
        ({"at": [0.0]}, "needs a compute above 0"),
        ({"bounds": (0.0, 0.5)}, "outside \\[0, 0.5\\]"),
    ):
        with pytest.raises(UserError, match=message):
            fit_curve(named(), resamples=20, **options)


def test_power_law_leaves_out_the_point_at_zero_compute():
    reward = power_law(COMPUTE, 0.8, 0.4, 3.0)
    curve = named(np.r_[0.0, COMPUTE], np.r_[0.1, reward])
    found = fit_curve(curve, law="power_law", resamples=20)
    np.testing.assert_allclose([found.fit.params[n] for n in "ABD"], [0.8, 0.4, 3.0], rtol=1e-5)
    assert len(found.describe()["residuals"]) == 30


def test_figures_show_fitted_and_held_out_points_on_all_axes(half, tmp_path):
    lost = fit_curve(named(reward=np.full(30, 0.5), name="flat"))
    figure = fits_figure([half, lost])
    linear, log, straight = figure.axes
    assert [axes.get_xscale() for axes in figure.axes] == ["linear", "log", "log"]
    for axes in (linear, log):
        dots = [len(line.get_xdata()) for line in axes.lines if line.get_marker() == "o"]
        assert sorted(dots) == [15, 15, 30]
        assert len(axes.collections) == 1  # the band of the one that has a fit
    # Straightened, the fit is a line of slope B, and points that were measured above A have no place.
    line = next(line for line in straight.lines if line.get_marker() == "None")
    slope = np.diff(line.get_ydata()) / np.diff(np.log(line.get_xdata()))
    np.testing.assert_allclose(slope, half.fit.params["B"], rtol=1e-6)
    assert [text.get_text() for text in linear.get_legend().get_texts()] == ["a", "flat (no fit)"]
    assert save_figure(figure, tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in save_figure(figure, tmp_path / "a.svg").read_bytes()
    with pytest.raises(UserError, match=r"ends in \.gif"):
        save_figure(figure, tmp_path / "a.gif")
    with pytest.raises(UserError, match="cannot be written"):
        save_figure(figure, tmp_path / "none" / "a.png")
    with pytest.raises(UserError, match="no curve to plot"):
        fits_figure([])
    two = fits_figure([half, half], kinds=["recipe", "recipe"])
    assert [text.get_text() for text in two.axes[0].get_legend().get_texts()] == ["recipe"]
    assert figure._repr_png_().startswith(b"\x89PNG")


def table(path, columns):
    names = list(columns)
    rows = zip(*columns.values(), strict=True)
    path.write_text(",".join(names) + "\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    return path


def test_chinchilla_from_a_table_under_other_names(tmp_path):
    N, D = (axis.ravel() for axis in np.meshgrid(np.geomspace(1e8, 1e10, 5), np.geomspace(2e9, 2e11, 5)))
    loss = chinchilla.loss(N, D, *chinchilla.REPLICATION)
    path = table(tmp_path / "c.csv", {"loss": loss, "tokens": D, "params": N})
    (found,) = fit_law(path, "chinchilla", x="params,tokens")
    np.testing.assert_allclose(list(found.fit.params.values()), chinchilla.REPLICATION, rtol=1e-5)
    described = json.loads(json.dumps(found.describe(), allow_nan=False))
    assert described["N"] == N.tolist()
    np.testing.assert_allclose(described["residuals"], 0, atol=1e-7)
    with pytest.raises(UserError, match="has no column 'N', only loss, tokens, params"):
        fit_law(path, "chinchilla")
    with pytest.raises(UserError, match="columns N, D; --x names 1: params"):
        fit_law(path, "chinchilla", x="params")
    with pytest.raises(UserError, match="no compute axis to fit a first part of"):
        fit_law(path, "chinchilla", x="params,tokens", upto=1e9)
    with pytest.raises(UserError, match="has 2 columns, so --at"):
        fit_law(path, "chinchilla", x="params,tokens", ahead=[1e9])


def test_tan_within_a_run_predicts_the_rest_of_every_model(tmp_path):
    sizes = {"1.5B": 1.5, "7B": 7.0, "32B": 32.0}
    rows = {"model": [], "N": [], "C": [], "loss": []}
    K_max, N_0 = tan.PUBLISHED["base", "C", "intra"]
    for index, (label, N) in enumerate(sizes.items()):
        for C in np.geomspace(1e18, 1e20, 8):
            for name, value in zip(rows, (label, N, C, tan.loss(N, C, K_max, N_0, 0.5 + index)), strict=True):
                rows[name].append(value)
    path = table(tmp_path / "tan.csv", rows)
    (found,) = fit_law(path, "tan", x="N,C", group="model", upto=2e19)
    assert (found.used.sum(), len(found.used)) == (15, 24)
    np.testing.assert_allclose([found.fit.params["K_max"], found.fit.params["N_0"]], [K_max, N_0], rtol=1e-5)
    assert found.forecast_error < 1e-5
    described = found.describe()
    assert len(described["predictions"]) == 9
    assert described["predictions"][0]["group"] == "1.5B"
    # The same column makes a fit for each model where the law has no parameter for each.
    lines = fit_law(path, "tan_line", x="C", group="model", ahead=[1e21])
    assert [one.name for one in lines] == list(sizes)
    k = [one.fit.params["k"] for one in lines]
    np.testing.assert_allclose(k, [tan.slope(N, K_max, N_0) for N in sizes.values()], rtol=1e-5)
    assert lines[0].describe()["predictions"][0]["X"] == 1e21


def test_tan_over_both_axes(tmp_path):
    rng = np.random.default_rng(0)
    N = np.repeat([1.0, 4.0, 16.0], 8)
    D = np.tile(np.geomspace(1e3, 1e5, 8), 3)
    loss = tan.loss(N, D, 0.15, 10.0, 0.3)
    labels = np.repeat(["a", "b", "c"], 8)
    C = N * D * 6e12 * np.exp(0.01 * rng.normal(size=24))
    path = table(tmp_path / "both.csv", {"model": labels, "N": N, "C": C, "D": D, "loss": loss})
    (found,) = fit_law(path, "tan_both", group="model")
    np.testing.assert_allclose(found.fit.params["phi"], 6e12, rtol=0.02)
    np.testing.assert_allclose(found.fit.params["K_max"], 0.15, rtol=0.02)


def test_a_table_that_cannot_carry_a_law_says_why(tmp_path):
    path = table(tmp_path / "k.csv", {"N": [1e6, 2e6, 3e6, 4e6], "loss": [3.0, 3.0, 3.0, 3.0]})
    (found,) = fit_law(path, "kaplan_N")
    assert found.fit is None
    assert "constant data does not tell" in found.describe()["error"]
    bad = table(tmp_path / "bad.csv", {"N": [1e6, 2e6, 3e6, 4e6], "loss": [3.0, 2.9, -1.0, 2.7]})
    (found,) = fit_law(bad, "kaplan_N")
    assert "loss is -1 at point 3" in found.reason
    with pytest.raises(UserError, match="law of reward over compute"):
        fit_law(path, "sigmoid")
