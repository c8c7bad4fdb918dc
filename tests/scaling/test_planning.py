"""Plans: worked numbers of the published laws, and a planted sweep whose best split is known."""

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from jaxrl_llm.scaling import chinchilla, kaplan, tan
from jaxrl_llm.scaling.fit import fit
from jaxrl_llm.scaling.laws import sigmoid
from jaxrl_llm.scaling.planning import (
    fit_sweep,
    isoflop_table,
    plan_published_rollouts,
    plan_rollouts,
    pretraining_split,
    published_pretraining,
    size_plan,
)
from jaxrl_llm.types import UserError


@pytest.mark.parametrize("law", ["chinchilla", "kaplan_ND"])
@pytest.mark.parametrize("C", [1e18, 5.88e23])
def test_the_split_is_the_minimum_over_sizes(law, C):
    params = published_pretraining(law)
    split = pretraining_split(C, law, params)
    assert pytest.approx(C, rel=1e-12) == 6 * split.N * split.D
    loss = (chinchilla if law == "chinchilla" else kaplan).loss
    best = minimize_scalar(
        lambda x: float(loss(np.exp(x), C / (6 * np.exp(x)), **params)),
        bounds=(np.log(split.N) - 3, np.log(split.N) + 3),
        method="bounded",
        options={"xatol": 1e-10},
    )
    assert np.exp(best.x) == pytest.approx(split.N, rel=1e-4)
    assert split.loss <= best.fun * (1 + 1e-12)


def test_chinchilla_split_by_hand():
    # G = (aA/(bB))^(1/(a+b)) with the replication's constants; N_opt = G (C/6)^(b/(a+b)).
    E, A, B, a, b = chinchilla.REPLICATION
    split = pretraining_split(6e20, "chinchilla", published_pretraining("chinchilla"))
    assert pytest.approx((a * A / (b * B)) ** (1 / (a + b)) * 1e20 ** (b / (a + b)), rel=1e-12) == split.N
    assert split.loss == pytest.approx(E + A / split.N**a + B / split.D**b, rel=1e-12)


def test_isoflop_table():
    params = published_pretraining("chinchilla")
    rows = isoflop_table(1e21, "chinchilla", params)
    assert min(rows, key=lambda row: row.loss) == rows[4]
    assert rows[4].excess == pytest.approx(0, abs=1e-12)
    for row in rows:
        assert pytest.approx(1e21) == 6 * row.N * row.D
        assert row.tokens_per_parameter == pytest.approx(row.D / row.N)
    (own,) = isoflop_table(1e21, "chinchilla", params, sizes=[1e9])
    assert own.loss == pytest.approx(chinchilla.loss(1e9, 1e21 / 6e9, **params), rel=1e-12)
    with pytest.raises(UserError, match="must be above 0"):
        isoflop_table(1e21, "chinchilla", params, sizes=[0.0])
    with pytest.raises(UserError, match="buys nothing"):
        pretraining_split(-1.0, "chinchilla", params)
    with pytest.raises(UserError, match="tan does not split"):
        published_pretraining("tan")


def test_the_best_model_size_depends_on_the_budget():
    # Larger models have steeper slopes and, here, higher intercepts: they win later.
    K_max, N_0 = tan.PUBLISHED["base", "C", "intra"]
    sizes, intercepts = {"1.5B": 1.5, "7B": 7.0, "32B": 32.0}, {"1.5B": 0.35, "7B": 1.4, "32B": 3.6}
    labels = [label for label in sizes for _ in range(10)]
    N = np.array([sizes[label] for label in labels])
    X = np.tile(np.geomspace(1e17, 1e20, 10), 3)
    E = np.array([intercepts[label] for label in labels])
    found = fit("tan", {"N": N, "X": X, "loss": tan.loss(N, X, K_max, N_0, E)}, groups=labels)
    for budget in (1e17, 1e22):
        rows = size_plan(found, budget)
        by_hand = {label: float(tan.loss(size, budget, K_max, N_0, intercepts[label])) for label, size in sizes.items()}
        assert [row.model for row in rows] == sorted(by_hand, key=by_hand.get)
        assert rows[0].loss == pytest.approx(min(by_hand.values()), rel=1e-5)
        assert rows[0].beyond == (budget > 1e20)
    assert size_plan(found, 1e17)[0].model != size_plan(found, 1e22)[0].model
    with pytest.raises(UserError, match="not of tan_line"):
        size_plan(fit("tan_line", {"X": X[:10], "loss": tan.line_loss(X[:10], 0.05, 0.5)}), 1e20)


def sweep_rows(prompts=(32, 64), collapse=None):
    """n = 8, 16, .. 128: more rollouts rise later and end higher; B_p hardly matters."""
    rows = []
    for B_p in prompts:
        for index, n in enumerate((8, 16, 32, 64, 128)):
            C = np.geomspace(1e3, 1e6, 30)
            reward = sigmoid(C, 0.5 + 0.08 * index, 1.0, 4e3 * 3.2**index, 0.1) + (0.001 if B_p == 64 else 0.0)
            if collapse == (B_p, n):
                reward[-4:] = reward[-4:] - 0.2
            rows += [(B_p, n, c, r) for c, r in zip(C, reward, strict=True)]
    return [np.array(column, float) for column in zip(*rows, strict=True)]


@pytest.fixture(scope="module")
def sweep():
    return fit_sweep(*sweep_rows(), width=0.01)


def test_a_sweep_gives_back_its_frontier(sweep):
    budgets = np.geomspace(2e3, 8e5, 12)
    planted = np.array([[sigmoid(c, 0.5 + 0.08 * k, 1.0, 4e3 * 3.2**k, 0.1) for k in range(5)] for c in budgets])
    found = sweep.frontier(32, budgets)
    np.testing.assert_allclose(found.reward, planted.max(axis=1), atol=2e-3)
    np.testing.assert_array_equal(found.rollouts, 8 * 2 ** planted.argmax(axis=1))
    assert not sweep.skipped
    assert sweep.stable == {32: True, 64: True}


@pytest.mark.parametrize("budget", [5e3, 1e5, 5e5])
def test_a_plan_follows_the_law_and_spends_the_budget(sweep, budget):
    found = plan_rollouts(sweep, budget)
    assert found.prompts == 32  # the smallest that suffices
    assert found.rollouts == 2 ** np.clip(np.round(float(sweep.law[32].predict(budget))), 3, 7)
    assert found.prompts * found.rollouts * found.steps == pytest.approx(budget)
    best = float(sweep.frontier(32, np.array([budget])).reward[0])
    assert best - found.reward < 0.02
    assert found.batch == found.prompts * found.rollouts
    in_tokens = plan_rollouts(sweep, budget, step_compute=lambda B_p, n: B_p * n * 250.0)
    assert in_tokens.steps == pytest.approx(found.steps / 250)


def test_beyond_the_sweep_a_plan_warns(sweep):
    found = plan_rollouts(sweep, 1e8)
    assert any("beyond the points" in text for text in found.warnings)
    assert any("does not pay for one step" in text for text in plan_rollouts(sweep, 100.0).warnings)


def test_a_batch_that_collapses_is_not_planned():
    found = fit_sweep(*sweep_rows(collapse=(32, 64)), width=0.01)
    assert found.stable == {32: False, 64: True}
    assert plan_rollouts(found, 1e5).prompts == 64
    with pytest.raises(UserError, match="none of B_p = 32 was stable"):
        plan_rollouts(fit_sweep(*sweep_rows((32,), collapse=(32, 64)), width=0.01), 1e5)


def test_a_sweep_of_too_few_records_or_sizes_says_so():
    B_p, n, C, reward = sweep_rows((32,))
    few = np.isin(n, (8, 16))
    found = fit_sweep(B_p[few], n[few], C[few], reward[few], width=0.01)
    assert "law needs three" in found.law_skipped[32]
    assert any("no n*(C) law" in text for text in plan_rollouts(found, 1e5).warnings)
    with pytest.raises(UserError, match="1 record-breaking points of 30"):
        fit_sweep(B_p[few], n[few], C[few], reward[few], width=2.0)
    with pytest.raises(UserError, match="not in order of compute"):
        fit_sweep(B_p[few], n[few], C[few][::-1], reward[few], width=0.01)
    with pytest.raises(UserError, match="n must be whole numbers"):
        fit_sweep(B_p[few], n[few] + 0.5, C[few], reward[few], width=0.01)


@pytest.mark.parametrize(
    ("budget", "n"), [(10**4.5, 8), (10**5.0, 8), (10**5.5, 16), (10**6.0, 128), (10**6.5, 512), (1e9, 512)]
)
def test_published_rollouts(budget, n):
    # log2 n* of the published law: 2.7405, 2.8406, 3.7403, 6.8794, 8.5661, 8.82; easy prompts saturate at 512.
    found = plan_published_rollouts(budget)
    assert (found.rollouts, found.prompts) == (n, 32)
    assert found.steps == pytest.approx(budget / (32 * n))
    assert plan_published_rollouts(budget, difficulty="hard").rollouts == min(n, 128)
    assert found.warnings


def test_published_rollouts_of_other_kinds_are_refused():
    with pytest.raises(UserError, match="not over flops"):
        plan_published_rollouts(1e6, axis="flops")
    with pytest.raises(UserError, match="difficulty is 'medium'"):
        plan_published_rollouts(1e6, difficulty="medium")
    with pytest.raises(UserError, match="buys nothing"):
        plan_published_rollouts(0.0)
