"""One batched least-squares fitter: many starts x many curves (or resamples) in one vmapped, jitted call.

Variable projection: given a law's shape parameters (ln B and, for the sigmoid, ln C_mid), the reward is linear in its
two levels, y = R0 (1 - s) + A s with 0 <= s <= 1, and the best levels under lower <= R0 <= A <= upper follow in closed
form. Levenberg-Marquardt then has one or two bounded parameters left, which makes it robust to poor starts.

Everything is float64 inside a `jax.enable_x64` context, whatever the caller's configuration. Curves are padded and
problems grouped into a few fixed sizes, so that repeated fits reuse the compiled program.
"""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_llm.scaling import laws
from jaxrl_llm.scaling.curves import Curve
from jaxrl_llm.scaling.least_squares import Minimum, levenberg_marquardt
from jaxrl_llm.types import UserError

Shape = Literal["sigmoid", "sigmoid_b", "power"]

FEWEST_POINTS = 4
COMFORTABLE_POINTS = 10
B_RANGE = (0.05, 50.0)
# C_mid may lie this far outside the points, as a factor of the least and of the greatest positive compute.
C_MID_REACH = (1e-2, 1e3)

_START_B = (0.3, 0.8, 1.6, 3.5, 8.0)
_START_PLACES = (-0.25, 0.05, 0.25, 0.45, 0.65, 0.85, 1.05, 1.5)  # of C_mid, in spans of ln C
_ZERO_COMPUTE = -1e6  # ln C of a point at C = 0: the sigmoid is exactly R0 there
_CHUNK = 256  # problems per call: one compiled size, small enough for the cache; a chunk ends with its slowest descent
_SHORT, _LONG = 6, 200  # iterations
_WIDTHS = (32, 64, 96, 128)


class _Problem(NamedTuple):
    """What one descent needs; under vmap every leaf gains a leading axis. Leaves are float64 and
    bool, numpy arrays on the host and JAX arrays once traced."""

    x: Any  # [N] ln C, shifted so that the points' middle is 0
    y: Any  # [N]
    root_weight: Any  # [N] square root of the weight; 0 is padding
    origin: Any  # [] power law: x of the least compute; sigmoid_b: ln C_mid
    A: Any  # [] value of A where it is fixed
    A_free: Any  # [] bool
    R0: Any  # [] value of R0 where it is fixed
    R0_free: Any  # [] bool
    lower: Any  # [] least R0
    upper: Any  # [] greatest A
    start: Any  # [P] shape parameters: ln B, and for the sigmoid ln C_mid
    low: Any  # [P]
    high: Any  # [P]


def _shape(shape: Shape, p: Array, problem: _Problem) -> Array:
    """s [N] in y = R0 (1 - s) + A s."""
    if shape == "sigmoid":
        return jax.nn.sigmoid(jnp.exp(p[0]) * (problem.x - p[1]))
    if shape == "sigmoid_b":
        return jax.nn.sigmoid(jnp.exp(p[0]) * (problem.x - problem.origin))
    return -jnp.expm1(-jnp.exp(p[0]) * (problem.x - problem.origin))


def _levels(s: Array, problem: _Problem) -> tuple[Array, Array]:
    """The best (R0, A) for shape s [N]: a convex quadratic over lower <= R0 <= A <= upper, solved edge by edge."""
    w, y, lower, upper = jnp.square(problem.root_weight), problem.y, problem.lower, problem.upper
    a, b, c = jnp.sum(w * (1 - s) * (1 - s)), jnp.sum(w * s * (1 - s)), jnp.sum(w * s * s)
    u, v = jnp.sum(w * (1 - s) * y), jnp.sum(w * s * y)

    def ratio(top: Array, bottom: Array, otherwise: Array) -> Array:
        usable = bottom > 1e-200
        return jnp.where(usable, top / jnp.where(usable, bottom, 1.0), otherwise)

    def best_A(R0: Array) -> Array:
        return jnp.clip(ratio(v - b * R0, c, R0), R0, upper)

    def best_R0(A: Array) -> Array:
        return jnp.clip(ratio(u - b * A, a, A), lower, A)

    def cost(R0: Array, A: Array) -> Array:
        return a * R0 * R0 + 2 * b * R0 * A + c * A * A - 2 * u * R0 - 2 * v * A

    determinant = a * c - b * b
    regular = determinant > 1e-13 * a * c
    safe = jnp.where(regular, determinant, 1.0)
    R0_inner, A_inner = (c * u - b * v) / safe, (a * v - b * u) / safe
    inside = regular & (lower <= R0_inner) & (R0_inner <= A_inner) & (A_inner <= upper)
    level = jnp.clip(ratio(u + v, a + 2 * b + c, lower), lower, upper)
    edges_R0 = jnp.stack([best_R0(upper), lower, level])
    edges_A = jnp.stack([upper, best_A(lower), level])
    edge = jnp.argmin(cost(edges_R0, edges_A))
    R0_free = jnp.where(inside, R0_inner, edges_R0[edge])
    A_free = jnp.where(inside, A_inner, edges_A[edge])

    R0 = jnp.where(problem.R0_free, jnp.where(problem.A_free, R0_free, best_R0(problem.A)), problem.R0)
    A = jnp.where(problem.A_free, jnp.where(problem.R0_free, A_free, best_A(problem.R0)), problem.A)
    return R0, A


def _descend(shape: Shape, iterations: Array, problem: _Problem) -> tuple[Minimum, Array, Array]:
    def residuals(p: Array) -> Array:
        s = _shape(shape, p, problem)
        R0, A = _levels(s, problem)
        return problem.root_weight * (R0 + (A - R0) * s - problem.y)

    minimum = levenberg_marquardt(
        residuals,
        problem.start,
        problem.low,
        problem.high,
        max_iterations=iterations,
        rounding=1e-28 * jnp.sum(jnp.square(problem.root_weight * problem.y)),
    )
    R0, A = _levels(_shape(shape, minimum.parameters, problem), problem)
    return minimum, R0, A


@functools.partial(jax.jit, static_argnames="shape")
def _descend_all(problems: _Problem, iterations: Array, *, shape: Shape) -> tuple[Minimum, Array, Array]:
    return jax.vmap(functools.partial(_descend, shape, iterations))(problems)


@contextlib.contextmanager
def float64_on_host() -> Iterator[None]:
    """float64 for the enclosed computation, on the CPU backend where the process has one (TPUs have no float64)."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.enable_x64(True))
        with contextlib.suppress(RuntimeError):  # a process restricted to another platform computes there
            stack.enter_context(jax.default_device(jax.local_devices(backend="cpu")[0]))
        yield


def _padded(points: int) -> int:
    """The width that a curve of so many points is padded to."""
    width = next((width for width in _WIDTHS if points <= width), _WIDTHS[-1])
    while width < points:
        width *= 2
    return width


@dataclass(frozen=True)
class Fits:
    """K least-squares fits; every array is float64 (or bool) [K]. `ssr` is the weighted sum of squared residuals."""

    A: np.ndarray
    B: np.ndarray
    C_mid: np.ndarray  # for the power law: nan
    R0: np.ndarray  # for the power law: the value at the least compute
    ssr: np.ndarray
    converged: np.ndarray


def sigmoid_starts(compute: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The default grid of starts (B, C_mid), float64 [K, S, 2], spread over each curve's points [K, N]."""
    used = (weights > 0) & (compute > 0)
    logs = np.log(np.where(used, compute, 1.0))
    least = np.min(np.where(used, logs, np.inf), axis=1)
    span = np.max(np.where(used, logs, -np.inf), axis=1) - least
    places = least[:, None] + span[:, None] * np.array(_START_PLACES)
    starts = np.empty((len(compute), len(_START_B), len(_START_PLACES), 2))
    starts[..., 0] = np.array(_START_B)[:, None]
    starts[..., 1] = np.exp(places)[:, None, :]
    return starts.reshape(len(compute), -1, 2)


def fit_batch(
    compute: np.ndarray,
    reward: np.ndarray,
    weights: np.ndarray | None = None,
    *,
    shape: Shape = "sigmoid",
    A: np.ndarray | float | None = None,
    R0: np.ndarray | float | None = None,
    C_mid: np.ndarray | float | None = None,
    lower: float = 0.0,
    upper: float = 1.0,
    starts: np.ndarray | None = None,
    shortlist: int | None = None,
) -> Fits:
    """Fit K curves at once, each from S starts, and keep the best of each.

    `compute`, `reward` and `weights` are [K, N]; weight 0 marks padding. `shape` is the law: "sigmoid", "sigmoid_b"
    (only B is fitted, C_mid given) or "power". `A` and `R0` are fixed where given ([K] or one number) and free where
    None. `starts` [K, S, 2] holds (B, C_mid) ([K, S, 1] where only B is searched) and defaults to a grid. With
    `shortlist` only so many of the starts, the best after a few iterations, are followed to the end. No input is
    checked and
    no curve refused here: `converged` speaks per curve, and `fit_sigmoid` is the careful front door.
    """
    compute, reward = np.asarray(compute, np.float64), np.asarray(reward, np.float64)
    curves, points = compute.shape
    weights = np.ones_like(compute) if weights is None else np.asarray(weights, np.float64)
    width = 2 if shape == "sigmoid" else 1
    if starts is not None:
        starts = np.asarray(starts, np.float64)[:, :, :width]
    elif shape == "sigmoid":
        starts = sigmoid_starts(compute, weights)
    else:
        starts = np.tile(np.array(_START_B)[:, None], (curves, 1, 1))
    lanes = starts.shape[1]

    positive = (weights > 0) & (compute > 0)
    logs = np.log(np.where(compute > 0, compute, 1.0))
    least = np.min(np.where(positive, logs, np.inf), axis=1)
    greatest = np.max(np.where(positive, logs, -np.inf), axis=1)
    middle = (least + greatest) / 2
    x = np.where(compute > 0, logs - middle[:, None], _ZERO_COMPUTE)
    x = np.where(weights > 0, x, 0.0)
    y = np.where(weights > 0, reward, 0.0)

    def each(value: np.ndarray | float | None) -> np.ndarray:
        return np.broadcast_to(np.asarray(0.0 if value is None else value, np.float64), (curves,))

    origin = np.log(each(C_mid)) - middle if shape == "sigmoid_b" else least - middle
    ends = [np.log(C_MID_REACH[0]) + least - middle, np.log(C_MID_REACH[1]) + greatest - middle]
    low, high = (np.stack([np.full(curves, np.log(B_RANGE[i])), ends[i]], axis=1)[:, :width] for i in (0, 1))
    inner = np.log(starts) - np.stack([np.zeros(curves), middle], axis=1)[:, None, :width]

    padding = _padded(points) - points
    per_curve = _Problem(
        x=np.pad(x, ((0, 0), (0, padding))),
        y=np.pad(y, ((0, 0), (0, padding))),
        root_weight=np.pad(np.sqrt(weights), ((0, 0), (0, padding))),
        origin=origin,
        A=each(A),
        A_free=np.full(curves, A is None),
        R0=each(R0),
        R0_free=np.full(curves, R0 is None),
        lower=each(lower),
        upper=each(upper),
        start=np.zeros((curves, width)),
        low=low,
        high=high,
    )
    start = np.clip(inner, low[:, None], high[:, None])
    if shortlist is not None and shortlist < lanes:
        parameters, ssr, *_ = _run(_spread(per_curve, start), shape, _SHORT)
        order = np.argsort(np.where(np.isfinite(ssr), ssr, np.inf).reshape(curves, lanes), axis=1, kind="stable")
        start = np.take_along_axis(parameters.reshape(start.shape), order[:, :shortlist, None], axis=1)
        lanes = shortlist
    parameters, ssr, converged, found_R0, found_A = _run(_spread(per_curve, start), shape, _LONG)

    # A start that strayed to nan loses to any that did not; one that failed to settle loses to an equal one that did.
    ranking = np.where(np.isfinite(ssr), ssr, np.inf).reshape(curves, lanes)
    near = ranking <= ranking.min(axis=1, keepdims=True) * (1 + 1e-9)
    pick = np.arange(curves) * lanes + np.argmin(
        np.where(near & converged.reshape(curves, lanes), -1.0, ranking), axis=1
    )
    log_B = parameters[pick, 0]
    if shape == "sigmoid":
        found_C_mid = np.exp(parameters[pick, 1] + middle)
    elif shape == "sigmoid_b":
        found_C_mid = each(C_mid).copy()
    else:
        found_C_mid = np.full(curves, np.nan)
    return Fits(found_A[pick], np.exp(log_B), found_C_mid, found_R0[pick], ssr[pick], converged[pick])


def _spread(per_curve: _Problem, start: np.ndarray) -> _Problem:
    """One problem for each of the starts [K, S, P] of each curve: K S in all."""
    curves, lanes, width = start.shape
    repeated = (np.repeat(field, lanes, axis=0) for field in per_curve)
    return _Problem(*repeated)._replace(start=start.reshape(curves * lanes, width))


def _run(problems: _Problem, shape: Shape, iterations: int) -> tuple[np.ndarray, ...]:
    """Run all problems [M, ...] through the compiled descent in chunks of fixed size (the last one padded).

    Returns shape parameters [M, P], ssr, converged, R0 and A, each [M].
    """
    count = len(problems.x)
    parts = []
    with float64_on_host():
        limit = jnp.asarray(iterations, jnp.int32)
        for begin in range(0, count, _CHUNK):
            piece = [field[begin : begin + _CHUNK] for field in problems]
            missing = _CHUNK - len(piece[0])
            # Padding repeats the last problem, which ends when that one does.
            piece = [np.concatenate([field, np.repeat(field[-1:], missing, axis=0)]) for field in piece]
            minimum, R0, A = _descend_all(_Problem(*map(jnp.asarray, piece)), limit, shape=shape)
            outputs = (minimum.parameters, minimum.ssr, minimum.converged, R0, A)
            parts.append([np.asarray(output)[: _CHUNK - missing] for output in outputs])
    return tuple(np.concatenate(part) for part in zip(*parts, strict=True))


@dataclass(frozen=True)
class SigmoidFit:
    """One fitted ScaleRL sigmoid. `C_mid` is in the unit of the curve's compute, the rest in that of the reward.

    `r0_source`: "zero" (measured at zero compute), "given" or "free" (fitted). `noise` is the residual standard
    deviation, degrees of freedom allowed for. `warnings` say why a number must not be trusted as it stands.
    """

    A: float
    B: float
    C_mid: float
    R0: float
    ssr: float
    noise: float
    points: int
    free_parameters: int
    converged: bool
    A_fixed: bool
    r0_source: Literal["zero", "given", "free"]
    lower: float
    upper: float
    warnings: tuple[str, ...]
    law: str = "sigmoid"
    protocol: Literal["least_squares", "published"] = "least_squares"

    def predict(self, compute: np.ndarray | float) -> np.ndarray:
        """The fitted reward after `compute` (any shape)."""
        return laws.sigmoid(np.asarray(compute, np.float64), self.A, self.B, self.C_mid, self.R0)


@dataclass(frozen=True)
class PowerLawFit:
    """One fitted power law with asymptote, A - D C^-B; see `SigmoidFit` for the fields they share."""

    A: float
    B: float
    D: float
    ssr: float
    points: int
    converged: bool
    warnings: tuple[str, ...]
    law: str = "power_law"

    def predict(self, compute: np.ndarray | float) -> np.ndarray:
        """The fitted reward after `compute` > 0 (any shape)."""
        return laws.power_law(np.asarray(compute, np.float64), self.A, self.B, self.D)


@dataclass(frozen=True)
class FitInput:
    """What enters a sigmoid fit of one curve: the points that count and the values that are held fixed."""

    curve: Curve
    A: float | None
    R0: float | None
    r0_source: Literal["zero", "given", "free"]
    lower: float
    upper: float

    @property
    def free_parameters(self) -> int:
        return 2 + (self.A is None) + (self.R0 is None)


def prepare_sigmoid(
    curve: Curve,
    *,
    A: float | None = None,
    R0: float | Literal["auto", "free"] = "auto",
    lower: float = 0.0,
    upper: float = 1.0,
) -> FitInput:
    """Settle what is fixed and refuse a curve that cannot be fitted (UserError with the reason). See `fit_sigmoid`."""
    source: Literal["zero", "given", "free"]
    if R0 == "auto":
        fixed, source = curve.zero, "free" if curve.zero is None else "zero"
    elif R0 == "free":
        fixed, source = None, "free"
    else:
        fixed, source = float(R0), "given"
    outside = np.flatnonzero((curve.reward < lower) | (curve.reward > upper))
    if outside.size:
        at = outside[0]
        raise UserError(
            f"reward {curve.reward[at]:g} at compute {curve.compute[at]:g} lies outside [{lower:g}, {upper:g}]; "
            "set the lower and upper bounds to those of the reward"
        )
    used = curve if fixed is None else curve.where(curve.compute > 0)
    free = 2 + (A is None) + (fixed is None)
    needed = max(FEWEST_POINTS, free + 1)
    if len(used) < needed:
        beyond = "" if fixed is None else " at positive compute"
        raise UserError(
            f"{len(used)} points{beyond} are too few to fit {free} parameters; at least {needed} are needed: "
            "evaluate more often or run longer"
        )
    if np.ptp(used.reward) == 0:
        raise UserError(
            f"the reward is {used.reward[0]:g} at every point; a constant curve does not tell A, B or C_mid"
        )
    if A is not None and not lower <= A <= upper:
        raise UserError(f"A fixed to {A:g} lies outside [{lower:g}, {upper:g}]; set the bounds or another A")
    if A is not None and fixed is not None and fixed >= A:
        raise UserError(f"R0 {fixed:g} is not below A {A:g}; fix other values")
    if fixed is not None and not lower <= fixed < upper:
        raise UserError(
            f"R0 {fixed:g} is not in [{lower:g}, {upper:g}); set the lower and upper bounds to those of the reward"
        )
    return FitInput(used, A, fixed, source, lower, upper)


def fit_sigmoid(
    curve: Curve,
    *,
    A: float | None = None,
    R0: float | Literal["auto", "free"] = "auto",
    lower: float = 0.0,
    upper: float = 1.0,
) -> SigmoidFit:
    """Least-squares fit of the ScaleRL sigmoid to one curve.

    `A` fixes the asymptote. `R0`: a number fixes it, "free" fits it, "auto" takes the point at zero compute if the
    curve has one and fits it otherwise. `lower <= R0 <= A <= upper` bound the levels (0 and 1 for accuracies).
    Raises UserError where the data cannot carry a fit: too few points, a constant or falling reward, a reward outside
    the bounds. What makes a fit doubtful is in its `warnings`.
    """
    given = prepare_sigmoid(curve, A=A, R0=R0, lower=lower, upper=upper)
    return sigmoid_fit(
        given,
        fit_batch(
            given.curve.compute[None],
            given.curve.reward[None],
            A=given.A,
            R0=given.R0,
            lower=given.lower,
            upper=given.upper,
        ),
    )


def sigmoid_fit(given: FitInput, fits: Fits, index: int = 0) -> SigmoidFit:
    """The `SigmoidFit` of one row of a batch, with its warnings; UserError where the curve does not rise."""
    curve = given.curve
    A, B, C_mid, R0, ssr = (float(v[index]) for v in (fits.A, fits.B, fits.C_mid, fits.R0, fits.ssr))
    converged = bool(fits.converged[index])
    if not np.isfinite(ssr):
        raise UserError("no start led to a finite fit of the sigmoid; check the curve for outliers")
    gain = A - R0
    if gain <= 1e-6 * np.ptp(curve.reward):
        raise UserError(
            f"the reward does not rise above R0 = {R0:.4g}: a falling or flat curve does not tell A, B or C_mid"
        )
    return SigmoidFit(
        A=A,
        B=B,
        C_mid=C_mid,
        R0=R0,
        ssr=ssr,
        noise=float(np.sqrt(ssr / (len(curve) - given.free_parameters))),
        points=len(curve),
        free_parameters=given.free_parameters,
        converged=converged,
        A_fixed=given.A is not None,
        r0_source=given.r0_source,
        lower=given.lower,
        upper=given.upper,
        warnings=_sigmoid_warnings(given, A, B, C_mid, R0, ssr, converged),
    )


def _sigmoid_warnings(
    given: FitInput, A: float, B: float, C_mid: float, R0: float, ssr: float, converged: bool
) -> tuple[str, ...]:
    curve, found = given.curve, []
    last = curve.compute[-1]
    least = curve.compute[curve.compute > 0][0]
    if not converged:
        found.append("the fit did not converge")
    if len(curve) < COMFORTABLE_POINTS:
        found.append(
            f"only {len(curve)} points for {given.free_parameters} parameters; {COMFORTABLE_POINTS} are wanted"
        )
    if C_mid > last:
        found.append(f"the curve is not past its middle (C_mid {C_mid:.3g} > last compute {last:.3g}): A is a guess")
    if given.A is None and reaches(A, given.upper):
        found.append(f"A is at its bound {given.upper:g}: the data does not tell the asymptote")
    if _on_edge(B, B_RANGE):
        found.append(f"B is at its bound {B:.3g}: the points do not resolve the rise")
    if _on_edge(C_mid, (least * C_MID_REACH[0], last * C_MID_REACH[1])):
        found.append(f"C_mid is at its bound {C_mid:.3g}: the rise lies outside the points")
    found.extend(reward_warnings(curve))
    if ssr > 0.5 * float(np.sum(np.square(curve.reward - curve.reward.mean()))):
        found.append("the sigmoid explains less than half of the reward's variance: no clear rise in these points")
    return tuple(found)


def reaches(level: float, bound: float) -> bool:
    return bound - level <= 1e-6


def _on_edge(value: float, bounds: tuple[float, float]) -> bool:
    return value <= bounds[0] * 1.001 or value >= bounds[1] * 0.999


def reward_warnings(curve: Curve) -> list[str]:
    """Warnings that speak about the points alone: here, a reward that falls by over a fifth of its range."""
    running = np.maximum.accumulate(curve.reward)
    drop = running - curve.reward
    worst = int(np.argmax(drop))
    if drop[worst] > 0.2 * np.ptp(curve.reward):
        return [
            f"the reward is not monotone: at compute {curve.compute[worst]:.3g} it is {drop[worst]:.3g} below an "
            "earlier point, which a sigmoid cannot follow"
        ]
    return []


def fit_power_law(curve: Curve, *, lower: float = 0.0, upper: float = 1.0) -> PowerLawFit:
    """Least-squares fit of A - D C^-B to the points at positive compute, for contrast with the sigmoid.

    A <= `upper`, and `lower` bounds the value at the least compute. Raises UserError as `fit_sigmoid` does.
    """
    given = prepare_sigmoid(curve.where(curve.compute > 0), R0="free", lower=lower, upper=upper)
    used = given.curve
    fits = fit_batch(used.compute[None], used.reward[None], shape="power", lower=lower, upper=upper)
    A, B, first = float(fits.A[0]), float(fits.B[0]), float(fits.R0[0])
    warnings = [] if fits.converged[0] else ["the fit did not converge"]
    if reaches(A, upper):
        warnings.append(f"A is at its bound {upper:g}: the data does not tell the asymptote")
    if _on_edge(B, B_RANGE):
        warnings.append(f"B is at its bound {B:.3g}")
    warnings.extend(reward_warnings(used))
    return PowerLawFit(
        A=A,
        B=B,
        D=float((A - first) * np.exp(B * np.log(used.compute[0]))),
        ssr=float(fits.ssr[0]),
        points=len(used),
        converged=bool(fits.converged[0]),
        warnings=tuple(warnings),
    )
