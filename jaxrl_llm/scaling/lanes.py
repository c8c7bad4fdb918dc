"""Several starts per data set: which to follow, and which won."""

import numpy as np


def best_starts(start: np.ndarray, objective: np.ndarray, count: int) -> np.ndarray:
    """The `count` best of [K, S, P] by objective [K, S]; one that strayed to nan comes last."""
    order = np.argsort(np.where(np.isfinite(objective), objective, np.inf), axis=1, kind="stable")
    return np.take_along_axis(start, order[:, :count, None], axis=1)


def best_lane(objective: np.ndarray, converged: np.ndarray) -> np.ndarray:
    """For each of K rows of S, the flat index of its best lane.

    A lane that strayed to nan loses to any that did not; one that failed to settle loses to an equal one that did.
    """
    ranking = np.where(np.isfinite(objective), objective, np.inf)
    near = ranking <= ranking.min(axis=1, keepdims=True) * (1 + 1e-9)
    return np.arange(len(ranking)) * ranking.shape[1] + np.argmin(np.where(near & converged, -1.0, ranking), axis=1)
