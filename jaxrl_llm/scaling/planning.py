"""Plans for a budget from fitted laws: model size and tokens, rollouts per prompt, prompts per step and steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_llm.scaling import chinchilla, isocompute, kaplan
from jaxrl_llm.scaling.fit import Fit, fit
from jaxrl_llm.types import UserError

ISOFLOP_FACTORS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
COLLAPSE = 0.2  # of its range: a run that ends so far below its best is not stable


# --- pretraining: C = 6 N D ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class IsoFlopRow:
    """One model size at a budget: its tokens, its loss, and how much that is above the best."""

    N: float
    D: float
    loss: float
    excess: float

    @property
    def tokens_per_parameter(self) -> float:
        return self.D / self.N


def published_pretraining(law: str) -> dict[str, float]:
    """Published constants of "chinchilla" (the replication's) or "kaplan_ND"; UserError for other laws."""
    if law == "chinchilla":
        return dict(chinchilla.REPLICATION._asdict())
    if law == "kaplan_ND":
        return dict(zip(("N_c", "alpha_N", "D_c", "alpha_D"), kaplan.BOTH, strict=True))
    raise UserError(f"{law} does not split a pretraining budget; choose chinchilla or kaplan_ND")


def pretraining_split(C: float, law: str, params: Mapping[str, float]) -> chinchilla.Split:
    """Parameters N and tokens D that give the least loss at C = 6 N D FLOPs, and that loss.

    For kaplan_ND the minimum over N of L(N, C / 6 N) is N = [a N_c^a C / (6 D_c)]^(1/(1+a)), a = alpha_N / alpha_D.
    (The paper's N_opt ~ C^0.73 is an empirical allocation, not this minimum.)
    """
    if not C > 0:
        raise UserError(f"a budget of {C:g} FLOPs buys nothing; give one above 0")
    if law == "chinchilla":
        return chinchilla.optimal_split(C, **params)
    published_pretraining(law)
    a = params["alpha_N"] / params["alpha_D"]
    log_N = (np.log(a) + a * np.log(params["N_c"]) + np.log(C) - np.log(6.0 * params["D_c"])) / (1.0 + a)
    N = float(np.exp(log_N))
    return chinchilla.Split(N, C / (6.0 * N), kaplan.loss(N, C / (6.0 * N), **params))


def isoflop_table(
    C: float, law: str, params: Mapping[str, float], sizes: Sequence[float] | None = None
) -> list[IsoFlopRow]:
    """Loss over model size at one budget: `sizes` (parameters), or the best one times a quarter to four."""
    best = pretraining_split(C, law, params)
    at = np.array([float(best.N) * factor for factor in ISOFLOP_FACTORS] if sizes is None else sizes, np.float64)
    if at.size == 0 or np.any(~(at > 0)):
        raise UserError("model sizes of an IsoFLOP table must be above 0")
    loss = (chinchilla if law == "chinchilla" else kaplan).loss(at, C / (6.0 * at), **params)
    return [IsoFlopRow(float(N), C / (6.0 * N), float(L), float(L - best.loss)) for N, L in zip(at, loss, strict=True)]


# --- model size for RL: Tan et al. --------------------------------------------------------------------------------


@dataclass(frozen=True)
class SizeRow:
    """A model of the fit at a budget: its size, slope k(N) and predicted loss; `beyond`: past its own points."""

    model: str
    N: float
    slope: float
    loss: float
    beyond: bool


def size_plan(found: Fit, X: float) -> list[SizeRow]:
    """The models of a fit of the law "tan", best first, at X (FLOPs or samples, whichever was fitted)."""
    if found.law != "tan":
        raise UserError(f"model sizes are planned from a fit of tan, not of {found.law}")
    N, points = found.data.columns
    rows = []
    for index, label in enumerate(found.data.labels):
        own = found.data.groups == index
        size = float(N[own][0])
        if np.any(N[own] != size):
            raise UserError(f"the points of {label} have several N; one group is one model")
        slope = found.params["K_max"] / (1.0 + found.params["N_0"] / size)
        loss = float(found.predict(size, X, group=label))
        rows.append(SizeRow(label, size, slope, loss, bool(points[own].max() < X)))
    return sorted(rows, key=lambda row: row.loss)


# --- rollouts: IsoCompute -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SweepFit:
    """A sweep over B_p and n. `curves` holds the sigmoid of every (B_p, n) that could be fitted, `skipped` why others
    could not; `law` the fitted n*(C) of each B_p, `law_skipped` why there is none; `stable` whether all runs of a B_p
    kept what they had reached; `reach` the budgets of each curve's own points."""

    curves: dict[tuple[int, int], Fit]
    skipped: dict[tuple[int, int], str]
    reach: dict[tuple[int, int], tuple[float, float]]
    stable: dict[int, bool]
    law: dict[int, Fit]
    law_skipped: dict[int, str]

    def frontier(self, prompts: int, budgets: np.ndarray) -> isocompute.Frontier:
        """The upper envelope over n of one B_p at `budgets` [M], each curve within its own points' reach."""
        curves = {n: found.predict for (B_p, n), found in self.curves.items() if B_p == prompts}
        reach = {n: ends for (B_p, n), ends in self.reach.items() if B_p == prompts}
        return isocompute.frontier(budgets, curves, reach)


@dataclass(frozen=True)
class RolloutPlan:
    """How to spend a budget: rollouts per prompt, prompts per step (B_p), steps (M), and what they should reach."""

    budget: float
    rollouts: int
    log2_rollouts: float
    prompts: int
    steps: float
    reward: float | None
    warnings: tuple[str, ...]

    @property
    def batch(self) -> int:
        """Completions per step."""
        return self.prompts * self.rollouts


def fit_sweep(
    prompts: np.ndarray,
    rollouts: np.ndarray,
    compute: np.ndarray,
    reward: np.ndarray,
    *,
    width: float = 0.01,
    bounds: tuple[float, float] = (0.0, 1.0),
    budgets: int = 40,
) -> SweepFit:
    """Fit a sweep as IsoCompute does. Rows (B_p, n, C, validation reward), all [K]; those of one (B_p, n) are a run.

    Of every run the record-breaking points (buckets of `width`) are fitted with a sigmoid in ln C; over `budgets`
    budgets the best n of each B_p is read off the frontier; to those the n*(C) law is fitted. A run that ends more
    than a fifth of its range below its best makes its B_p unstable. Raises UserError where nothing can be fitted.
    """
    keys = list(zip(_whole("B_p", prompts), _whole("n", rollouts), strict=True))
    curves: dict[tuple[int, int], Fit] = {}
    skipped: dict[tuple[int, int], str] = {}
    reach: dict[tuple[int, int], tuple[float, float]] = {}
    stable: dict[int, bool] = {}
    for key in sorted(set(keys)):
        own = np.array([other == key for other in keys])
        C, R = compute[own], reward[own]
        if np.any(np.diff(C) <= 0):
            raise UserError(f"the points of B_p = {key[0]}, n = {key[1]} are not in order of compute, or repeat one")
        held = R.max() - R[-1] <= COLLAPSE * np.ptp(R)
        stable[key[0]] = stable.get(key[0], True) and bool(held)
        records = isocompute.record_points(R, width)
        try:
            curves[key] = fit(
                "sigmoid", {"compute": C[records], "reward": R[records]}, bounds={"A": bounds, "R0": bounds}
            )
        except UserError as error:
            skipped[key] = f"{records.sum()} record-breaking points of {len(C)}: {error}"
            continue
        positive = C[C > 0]
        reach[key] = (float(positive.min()), float(positive.max()))
    if not curves:
        raise UserError(f"no (B_p, n) of the sweep can be fitted; {next(iter(skipped.values()))}")
    partial = SweepFit(curves, skipped, reach, stable, {}, {})
    law, law_skipped = {}, {}
    for B_p in sorted({B_p for B_p, _ in curves}):
        try:
            law[B_p] = _rollout_law(partial, B_p, budgets)
        except UserError as error:
            law_skipped[B_p] = str(error)
    return SweepFit(curves, skipped, reach, stable, law, law_skipped)


def _whole(name: str, values: np.ndarray) -> list[int]:
    if np.any(values != np.round(values)) or np.any(values < 1):
        raise UserError(f"{name} must be whole numbers of at least 1")
    return [int(value) for value in values]


def _rollout_law(sweep: SweepFit, prompts: int, budgets: int) -> Fit:
    ends = [reach for (B_p, _), reach in sweep.reach.items() if B_p == prompts]
    grid = np.geomspace(min(low for low, _ in ends), max(high for _, high in ends), budgets)
    covered = np.array([any(low <= C <= high for low, high in ends) for C in grid])
    best = sweep.frontier(prompts, grid[covered])
    log2_n = np.log2(best.rollouts)
    if len(set(log2_n)) < 3:
        raise UserError(
            f"at B_p = {prompts} only n = {', '.join(map(str, sorted(set(best.rollouts))))} is ever best; the n*(C) "
            "law needs three, so widen the sweep"
        )
    return fit("isocompute", {"C": best.C, "log2_n": log2_n})


StepCompute = Callable[[int, int], float]


def in_rollouts(prompts: int, rollouts: int) -> float:
    """The compute of one step of B_p prompts with n rollouts each, where compute counts rollouts."""
    return float(prompts * rollouts)


def plan_rollouts(
    sweep: SweepFit, budget: float, *, step_compute: StepCompute = in_rollouts, margin: float = 0.01
) -> RolloutPlan:
    """n, B_p and M of a budget, from a fitted sweep.

    n comes from the n*(C) law of each B_p (its best curve where it has no law), rounded to the sweep's own n; B_p is
    the smallest stable one whose reward is within `margin` of the best; M = budget / `step_compute`(B_p, n), in the
    unit of the sweep's compute.
    """
    if not budget > 0:
        raise UserError(f"a budget of {budget:g} buys nothing; give one above 0")
    found: dict[int, tuple[float, int, float, list[str]]] = {}
    for B_p in sorted({B_p for B_p, _ in sweep.curves}):
        grid = sorted(n for other, n in sweep.curves if other == B_p)
        doubts = []
        if B_p in sweep.law:
            law = sweep.law[B_p]
            log2_n = float(law.predict(budget))
            doubts += [f"n*(C) at B_p = {B_p}: {text}" for text in law.warnings]
            n = isocompute.nearest_power_of_two(log2_n, grid)
            if not np.log2(grid[0]) - 0.5 <= log2_n <= np.log2(grid[-1]) + 0.5:
                doubts.append(f"the law asks for n = {2**log2_n:.4g}, outside the sweep's {grid[0]} to {grid[-1]}")
        else:
            n = max(grid, key=lambda n: float(sweep.curves[B_p, n].predict(budget)))
            log2_n = float(np.log2(n))
            doubts.append(f"no n*(C) law at B_p = {B_p} ({sweep.law_skipped[B_p]}): n is the best curve's")
        if budget > sweep.reach[B_p, n][1]:
            doubts.append(f"the budget is beyond the points of B_p = {B_p}, n = {n}: its reward is a forecast")
        if not sweep.stable[B_p]:
            doubts.append(f"a run of B_p = {B_p} did not keep what it had reached")
        doubts += [f"B_p = {B_p}, n = {n}: {text}" for text in sweep.curves[B_p, n].warnings]
        found[B_p] = (float(sweep.curves[B_p, n].predict(budget)), n, log2_n, doubts)
    prompts = isocompute.smallest_sufficient_prompts({B: row[0] for B, row in found.items()}, sweep.stable, margin)
    reward, n, log2_n, doubts = found[prompts]
    steps = budget / step_compute(prompts, n)
    if steps < 1:
        doubts = [*doubts, f"the budget does not pay for one step of {prompts} x {n} completions"]
    return RolloutPlan(budget, n, log2_n, prompts, steps, reward, tuple(doubts))


def plan_published_rollouts(
    budget: float,
    *,
    axis: str = "rollouts",
    prompts: int = 32,
    difficulty: str = "easy",
    step_compute: StepCompute = in_rollouts,
) -> RolloutPlan:
    """As `plan_rollouts`, from the published n*(C) at B_p = 32 (`axis` "rollouts" or "tokens"), which saturates at 512
    for easy prompts and about 128 for hard ones (for those only the ceiling is published)."""
    if axis not in isocompute.PUBLISHED:
        raise UserError(f"n*(C) is published over {' and '.join(isocompute.PUBLISHED)}, not over {axis}")
    if difficulty not in isocompute.SATURATION:
        raise UserError(f"difficulty is {difficulty!r}; choose {' or '.join(isocompute.SATURATION)}")
    if not budget > 0:
        raise UserError(f"a budget of {budget:g} buys nothing; give one above 0")
    exact = float(isocompute.log2_rollouts(budget, *isocompute.PUBLISHED[axis]))
    ceiling = isocompute.SATURATION[difficulty]
    n = min(isocompute.nearest_power_of_two(exact), ceiling)
    warnings = ["the constants are another model's and another task's: fit a cheap sweep of your own"]
    if difficulty == "hard":
        warnings.append("n*(C) is published for easy prompts; for hard ones only its ceiling, about 128, was applied")
    if prompts != 32:
        warnings.append("n*(C) is published at B_p = 32")
    return RolloutPlan(budget, n, exact, prompts, budget / step_compute(prompts, n), None, tuple(warnings))
