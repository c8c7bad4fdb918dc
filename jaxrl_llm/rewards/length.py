"""Length penalties: what is added to a reward as a completion nears the limit."""


def soft_overlong(length: int, *, limit: int, cache: int) -> float:
    """clip((limit - length) / cache - 1, -1, 0): 0 up to limit - cache tokens, then linear down to -1 at the limit.

    DAPO (arXiv:2503.14476) adds it to every completion, with limit 20480 and cache 4096; ScaleRL's variant adds it to
    correct ones only, with 14k and 2k. Never below -1, however long the completion.
    """
    return min(0.0, max(-1.0, (limit - length) / cache - 1.0))
