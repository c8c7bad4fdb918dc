"""Forced interruption: after its thinking budget a completion is given a phrase, token by token, then it answers.

ScaleRL (arXiv:2510.13786) ends thinking at a uniformly random length with a fixed phrase whose tokens are not trained.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from jaxrl_llm.types import UserError

# Folded into a request's key where its n-th token folds n: no completion is that long.
_BUDGET = 2**31 - 1


@dataclass(frozen=True)
class Interruption:
    """The phrase's ids, and the ids with which the policy ends its thinking itself (none if it has no such mark)."""

    phrase: tuple[int, ...]
    end_of_thinking: tuple[int, ...] = ()

    def check(self, vocab_size: int) -> None:
        """Raises UserError if there is no phrase, or an id that is no token."""
        if not self.phrase:
            raise UserError("the interruption phrase is empty; give it at least one token")
        for token in (*self.phrase, *self.end_of_thinking):
            if not 0 <= token < vocab_size:
                raise UserError(f"the interruption holds the id {token}, outside the vocabulary of {vocab_size} tokens")


def draw_budgets(keys_S: Key[Array, " S"], lowest_S: Int[Array, " S"], highest_S: Int[Array, " S"]) -> Int[Array, " S"]:
    """Uniform in lowest ... highest by the request's own key; 0 where both are 0.

    From 24 random bits: over a range of n lengths the probabilities differ by at most n / 2^24 of themselves.
    """
    bits = jax.random.key_data(jax.vmap(lambda key: jax.random.fold_in(key, _BUDGET))(keys_S))[:, 0] >> 8
    width = (highest_S - lowest_S + 1).astype(jnp.float32)
    place = jnp.floor(bits.astype(jnp.float32) * jnp.float32(2**-24) * width).astype(jnp.int32)
    return lowest_S + jnp.minimum(place, highest_S - lowest_S)
