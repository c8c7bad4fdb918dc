"""Where and in which sizes the fitter computes: float64 on the host's CPU, padded widths, fixed chunks of problems."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

CHUNK = 256  # problems per call: one compiled size, small enough for the cache; a chunk ends with its slowest descent
_WIDTHS = (32, 64, 96, 128)


@contextlib.contextmanager
def float64_on_host() -> Iterator[None]:
    """float64 for the enclosed computation, on the CPU backend where the process has one (TPUs have no float64)."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.enable_x64(True))
        with contextlib.suppress(RuntimeError):  # a process restricted to another platform computes there
            stack.enter_context(jax.default_device(jax.local_devices(backend="cpu")[0]))
        yield


def padded(points: int) -> int:
    """The width that a curve of so many points is padded to."""
    width = next((width for width in _WIDTHS if points <= width), _WIDTHS[-1])
    while width < points:
        width *= 2
    return width


def in_chunks(function: Callable[[Any], Any], problems: Any, width: int) -> tuple[np.ndarray, ...]:
    """`function` over all problems (a NamedTuple of arrays [M, ...]) in chunks of one size, the last one padded.

    `function` takes the NamedTuple with a chunk as its leading axis and returns a tuple of arrays with the same leading
    axis; the result is that tuple with a leading axis of M, as numpy arrays. `width` is the padded number of points:
    the longer the curves, the smaller the chunks.
    """
    count = len(problems[0])
    chunk = max(CHUNK * _WIDTHS[-1] // max(width, _WIDTHS[-1]), 8)
    parts = []
    with float64_on_host():
        for begin in range(0, count, chunk):
            piece = [field[begin : begin + chunk] for field in problems]
            missing = chunk - len(piece[0])
            if missing:
                # Padding repeats the last problem, which ends when that one does.
                piece = [np.concatenate([field, np.repeat(field[-1:], missing, axis=0)]) for field in piece]
            outputs = function(type(problems)(*map(jax.numpy.asarray, piece)))
            parts.append([np.asarray(output)[: chunk - missing] for output in outputs])
    return tuple(np.concatenate(part) for part in zip(*parts, strict=True))
