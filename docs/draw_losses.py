"""Draws docs/losses_weights.svg from the objectives themselves: python docs/draw_losses.py"""

from pathlib import Path

import jax
import matplotlib
import numpy as np

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "losses"  # the same file every time
from matplotlib import pyplot as plt  # noqa: E402

from jaxrl_llm.losses.algorithms import bind, bind_importance  # noqa: E402

WHOLE, NEAR_ONE = (0.05, 6.0), (0.9985, 1.0015)
PANELS = [
    ("REINFORCE", bind("reinforce"), None, WHOLE),
    ("PPO, GRPO: clip .2/.2", bind("ppo"), None, WHOLE),
    ("DAPO: clip .2/.28", bind("ppo", clip_high=0.28), None, WHOLE),
    ("PPO with dual clip 3", bind("ppo", dual_clip=3.0), None, WHOLE),
    ("GSPO: clip 3e-4/4e-4 (ratio of the sequence)", bind("gspo"), None, NEAR_ONE),
    ("CISPO: cap 5", bind("cispo", ratio_cap=5.0), None, WHOLE),
    ("TIS: C = 2", bind("reinforce"), bind_importance("tis", cap=2.0), WHOLE),
    ("MIS: [0, 2]", bind("reinforce"), bind_importance("mis", low=0.0, high=2.0), WHOLE),
    ("IcePop: [.5, 5]", bind("reinforce"), bind_importance("icepop"), WHOLE),
]


def weight(objective, correction, ratios_N: np.ndarray, advantage: float) -> np.ndarray:
    """dJ / d logp where logp - anchor = log ratio, each ratio a sequence of one token."""
    logprobs = np.log(ratios_N).astype(np.float64)[:, None]
    zeros, a, mask = np.zeros_like(logprobs), np.full(logprobs.shape, advantage), np.ones(logprobs.shape, bool)

    def total(logprobs):
        arrays = (logprobs, zeros, zeros if correction is None else logprobs, a, mask)
        j = objective(*arrays)
        return (j if correction is None else j * correction(*arrays)).sum()

    return np.asarray(jax.grad(total)(logprobs))[:, 0]


def main() -> None:
    figure, axes = plt.subplots(3, 3, figsize=(11, 8.5), constrained_layout=True)
    for axis, (title, objective, correction, span) in zip(axes.flat, PANELS, strict=True):
        ratios = np.linspace(*span, 601)
        for advantage, colour, style in ((1.0, "tab:blue", "-"), (-1.0, "tab:red", "--")):
            label = f"A = {advantage:+.0f}"
            axis.plot(ratios, weight(objective, correction, ratios, advantage), style, color=colour, label=label)
        axis.axhline(0, color="0.8", linewidth=0.8, zorder=0)
        axis.axvline(1, color="0.8", linewidth=0.8, zorder=0)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("ratio")
        axis.set_ylabel("dJ / d logp")
        limit = 1.35 if span is NEAR_ONE or title == "REINFORCE" else 6.0
        axis.set_ylim(-limit, limit)
        axis.ticklabel_format(axis="x", useOffset=False)
        axis.locator_params(axis="x", nbins=6)
    axes[0, 0].legend(loc="center right", fontsize=9)
    figure.savefig(Path(__file__).parent / "losses_weights.svg", metadata={"Date": None})


if __name__ == "__main__":
    with jax.enable_x64(True):
        main()
