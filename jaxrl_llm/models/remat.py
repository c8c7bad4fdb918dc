"""What a layer's forward pass leaves in memory for its backward pass, by name; the rest is worked out again."""

from collections.abc import Callable
from typing import Any, Literal

import jax

Remat = Literal["none", "dots", "dots_no_batch", "full"]

_POLICIES: dict[str, Callable[..., Any]] = {
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}
"""From most memory to least. A layer's products with weights have no batch dimension, those of attention have. Experts'
grouped products and attention kernels count as neither: they are always worked out again."""


def rematerialised(layer: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """`layer`, saving what the policy allows besides its arguments; itself with `none`. The numbers are the same."""
    return layer if remat == "none" else jax.checkpoint(layer, policy=_POLICIES[remat])
