"""The report's charts. Each takes the run and returns a figure, or None where the run did not record its numbers."""

import base64
import io
import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jaxrl_llm.report.run_files import RunFiles, last, series
from jaxrl_llm.scaling.eval_log import VALUE
from jaxrl_llm.scaling.plots import COLOURS, CURVE, FITTED, HELD_OUT, INK, MUTED, new_axes

_MOST_POINTS = 600  # per line; longer runs are binned
_WARNING_TRUNCATION = 0.10  # 10 to 15 % of truncated completions usually precede instability (ScaleRL)


def image(figure: Figure) -> str:
    """The figure as a data URI (SVG), for the src of an <img>."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def accuracy(run: RunFiles) -> Figure | None:
    """Held-out metric, of a mixture's sources too, and training pass rate against optimizer steps."""
    steps, values = series(run.evaluations, "value")
    trained = series(run.metrics, "pass_rate")
    if not steps.size and not trained[0].size:
        return None
    figure, axes = _step_axes("share correct")
    if trained[0].size:
        _noisy_line(axes, *trained, label="training completions")
    if steps.size:
        label = f"held out, {run.metric}".replace("$", r"\$")
        axes.plot(steps, values, "o-", color=HELD_OUT, ms=5, lw=1.8, label=label)
    for place, source in enumerate(run.sources):
        colour = COLOURS[(place + 2) % len(COLOURS)]  # the first two are the lines above
        axes.plot(*series(run.evaluations, f"{VALUE}/{source}"), "o-", color=colour, ms=3.5, lw=1.2, label=source)
    axes.set_ylim(-0.03, 1.03)
    return _finished(figure)


def reward(run: RunFiles) -> Figure | None:
    """Mean training reward."""
    return _one_line(run, "reward_mean", "mean reward")


def completion_length(run: RunFiles) -> Figure | None:
    """Mean completion length."""
    return _one_line(run, "completion_tokens_mean", "tokens per completion", floor=0.0)


def entropy(run: RunFiles) -> Figure | None:
    """Mean entropy of the policy per token."""
    return _one_line(run, "entropy", "nats per token", floor=0.0)


def truncation(run: RunFiles) -> Figure | None:
    """Share of completions cut off at the length limit."""
    steps, values = series(run.metrics, "truncation_rate")
    if not steps.size:
        return None
    figure, axes = _step_axes("share of completions")
    _noisy_line(axes, steps, values, label="truncated")
    axes.axhline(_WARNING_TRUNCATION, color=HELD_OUT, lw=1.2, ls="--", label="10 %: early warning")
    axes.set_ylim(-0.005, max(0.13, 1.1 * float(values.max())))
    return _finished(figure)


def lag_histogram(run: RunFiles) -> Figure | None:
    """How many versions behind the trainer the trained tokens were sampled, over the entire run."""
    histograms = [line["lag_histogram"] for line in run.metrics if _is_counts(line.get("lag_histogram"))]
    if not histograms:
        return None
    bound = last(run.metrics, "lag_bound")
    width = max(max(len(counts) for counts in histograms), 1 + int(bound or 0))
    total = np.zeros(width)
    for counts in histograms:
        total[: len(counts)] += counts
    figure, axes = new_axes()
    share = total / max(total.sum(), 1.0)
    axes.bar(np.arange(width), share, color=CURVE, width=0.75, label="trained tokens")
    if bound is not None:
        axes.axvline(bound + 0.5, color=HELD_OUT, lw=1.6, ls="--", label=f"bound {int(bound)}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    axes.set_ylim(0, 1.15 * max(float(share.max()), 0.01))
    axes.set_xlabel("lag (weight versions)")
    axes.set_ylabel("share of trained tokens")
    return _finished(figure)


def lag(run: RunFiles) -> Figure | None:
    """Largest and mean lag of each step's batch, and the bound."""
    greatest, mean, bound = (series(run.metrics, key) for key in ("lag_max", "lag_mean", "lag_bound"))
    if not greatest[0].size and not mean[0].size:
        return None
    figure, axes = _step_axes("lag (weight versions)")
    if greatest[0].size:
        axes.plot(*_binned(*greatest, np.max), color=FITTED, lw=1.4, label="largest")
    if mean[0].size:
        axes.plot(*_binned(*mean, np.mean), color=CURVE, lw=1.4, label="mean")
    if bound[0].size:
        axes.plot(*_binned(*bound, np.max), color=HELD_OUT, lw=1.6, ls="--", label="bound")
    axes.set_ylim(bottom=-0.1, top=1.2 * max([1.0, *(float(s[1].max()) for s in (greatest, bound) if s[0].size)]))
    return _finished(figure)


def mismatch(run: RunFiles) -> Figure | None:
    """Distance between the trainer's and the sampler's log-probabilities, both under the weights of one evaluation."""
    lines = [
        (label, *series(run.evaluations, key))
        for label, key in (("largest", "mismatch_max"), ("mean", "mismatch_mean"))
    ]
    lines = [(label, steps, values) for label, steps, values in lines if steps.size]
    if not lines:
        return None
    figure, axes = _step_axes("|difference|, nats")
    for (label, steps, values), color in zip(lines, (FITTED, CURVE), strict=False):
        axes.plot(*_binned(steps, values, np.max if label == "largest" else np.mean), color=color, lw=1.4, label=label)
    if all(values.min() > 0 for _, _, values in lines):
        axes.set_yscale("log")
    else:  # a log axis has no place for an exact 0
        axes.set_ylim(bottom=0)
    return _finished(figure)


def ratio(run: RunFiles) -> Figure | None:
    """Largest importance ratio of each step, before any capping."""
    return _one_line(run, "ratio_max", "largest importance ratio", reduce=np.max)


def gradient(run: RunFiles) -> Figure | None:
    """Global norm of the gradient before clipping."""
    return _one_line(run, "grad_norm", "gradient norm", floor=0.0)


def throughput(run: RunFiles) -> Figure | None:
    """Tokens per second of each step."""
    return _one_line(run, "tokens_per_s", "tokens per second", floor=0.0)


def idle(run: RunFiles) -> Figure | None:
    """Share of each step's time that trainer and sampler spent waiting."""
    shares = []
    for label, key in (("trainer waits", "trainer_wait_s"), ("sampler waits", "sampler_wait_s")):
        both = [line for line in run.metrics if (line.get("step_s") or 0) > 0]
        (steps, waits), (_, lengths) = series(both, key), series(both, "step_s")
        if steps.size and len(waits) == len(lengths):
            shares.append((label, steps, np.clip(waits / lengths, 0, 1)))
    if not shares:
        return None
    figure, axes = _step_axes("share of the step")
    for (label, steps, values), color in zip(shares, (FITTED, HELD_OUT), strict=False):
        axes.plot(*_binned(steps, values, np.mean), color=color, lw=1.4, label=label)
    axes.set_ylim(-0.03, 1.03)
    return _finished(figure)


def _step_axes(y_label: str) -> tuple[Figure, Axes]:
    figure, axes = new_axes()
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(y_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def _one_line(
    run: RunFiles,
    key: str,
    y_label: str,
    *,
    floor: float | None = None,
    reduce: Callable[[np.ndarray], float] = np.mean,
) -> Figure | None:
    steps, values = series(run.metrics, key)
    if not steps.size:
        return None
    figure, axes = _step_axes(y_label)
    _noisy_line(axes, steps, values, reduce=reduce)
    if floor is not None:
        axes.set_ylim(bottom=floor, top=1.12 * float(values.max()) if values.max() > floor else floor + 1.0)
    return _finished(figure)


def _noisy_line(
    axes: Axes,
    steps: np.ndarray,
    values: np.ndarray,
    *,
    label: str | None = None,
    reduce: Callable[[np.ndarray], float] = np.mean,
) -> None:
    """The values as they are, faint, under their moving average; a short series is drawn plainly."""
    steps, values = _binned(steps, values, reduce)
    window = len(values) // 25
    if window < 2:
        marker = "o-" if len(values) < 30 else "-"
        axes.plot(steps, values, marker, color=CURVE, lw=1.6, ms=3.5, label=label)
        return
    axes.plot(steps, values, color=CURVE, lw=0.9, alpha=0.35)
    kernel = np.ones(2 * window + 1)
    smooth = np.convolve(values, kernel, "same") / np.convolve(np.ones_like(values), kernel, "same")
    axes.plot(steps, smooth, color=CURVE, lw=2, label=label)


def _binned(
    steps: np.ndarray, values: np.ndarray, reduce: Callable[[np.ndarray], float]
) -> tuple[np.ndarray, np.ndarray]:
    size = math.ceil(len(steps) / _MOST_POINTS)
    if size <= 1:
        return steps, values
    starts = range(0, len(steps), size)
    return (
        np.array([steps[start : start + size].mean() for start in starts]),
        np.array([reduce(values[start : start + size]) for start in starts]),
    )


def _finished(figure: Figure) -> Figure:
    axes = figure.axes[0]
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        axes.legend(handles, labels, loc="best", fontsize=8, framealpha=0.9, edgecolor="none", labelcolor=INK)
    axes.yaxis.offsetText.set_color(MUTED)
    return figure


def _is_counts(value: object) -> bool:
    return isinstance(value, Sequence) and bool(value) and all(isinstance(v, (int, float)) and v >= 0 for v in value)


def training_charts(run: RunFiles) -> list[tuple[str, str, Figure | None]]:
    """Every chart of the training section: title, one line on how to read it, figure or None."""
    return [
        ("Accuracy", "Held-out evaluations and the pass rate of training completions.", accuracy(run)),
        ("Reward", "Mean training reward of each step.", reward(run)),
        ("Completion length", "Mean number of sampled tokens.", completion_length(run)),
        ("Entropy", "Mean entropy of the policy; a fall to 0 means that exploration has ended.", entropy(run)),
        ("Truncation rate", "Completions cut off at the length limit. Healthy runs stay under 5 %.", truncation(run)),
        ("Gradient norm", "Before clipping.", gradient(run)),
        ("Lag histogram", "How old the weights were that sampled the trained tokens.", lag_histogram(run)),
        ("Lag by step", "The bound is kept by counting; a batch beyond it stops the run.", lag(run)),
        (
            "Sampler-trainer mismatch",
            "Distance of the same tokens' log-probabilities under the same weights: numerics alone.",
            mismatch(run),
        ),
        ("Importance ratio", "Largest ratio of each step, before capping.", ratio(run)),
        ("Throughput", "Tokens per second.", throughput(run)),
        ("Idle time", "Share of each step that trainer and sampler spent waiting.", idle(run)),
    ]
