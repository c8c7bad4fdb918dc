"""A loss of single tokens with the head's gradient worked out in the same pass: three products of the head, not four.

Autodiff first works out every log-probability, then comes back to each chunk with its gradient and has to compute the
chunk's logits again. Where what a token costs depends on its own numbers alone, that gradient is known as soon as the
chunk's log-probabilities are, and the logits are still there.

Suffixes: N flat tokens, D model width, V vocabulary; K, M and S as in losses/chunks.py.
"""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.losses.chunks import Chunks, chunk_of, put_chunk
from jaxrl_llm.losses.logprobs import (
    HeadDtype,
    distribution,
    head_gradients,
    project_f32,
    rounded,
    soft_cap,
    summed_head_gradient,
    through_logits,
)

LossOf = Callable[[Array, Array, Mapping[str, Array]], Array]
"""(log-probabilities [S], entropies [S], fields of the same tokens) -> what each token costs [S]: a function of that
token's numbers alone, 0 without a gradient for tokens that are not wanted."""


def token_loss(
    hidden_ND: Float[Array, "N D"],
    head_VD: Float[Array, "V D"],
    targets_N: Int[Array, " N"],
    fields: Mapping[str, Array],
    loss_of: LossOf,
    *,
    temperature: float | Float[Array, ""],
    chunk: int,
    wanted_N: Bool[Array, " N"],
    shards: int = 1,
    dtype: HeadDtype = "float32",
    softcap: float | None = None,
) -> tuple[Float[Array, ""], Float[Array, " N"], Float[Array, " N"]]:
    """The sum of `loss_of` over the wanted tokens, and the log-probabilities and entropies of losses.logprobs.

    The sum is what `token_logprobs` and `loss_of` after it would give, and so are its gradients for `hidden` and
    `head`; `fields` ([N], by name) and the other two results have none. Arguments, sharding and errors as in
    `token_logprobs`.
    """
    temperature = lax.stop_gradient(jnp.asarray(temperature, jnp.float32))
    chunks = Chunks.of(hidden_ND.shape[0], chunk=chunk, shards=shards, wanted_N=wanted_N)
    hidden_ND = jnp.where(wanted_N[:, None], hidden_ND, 0)  # what nobody wants may be NaN, and 0 * NaN would spread
    laid = {name: chunks.lay(lax.stop_gradient(x_N)) for name, x_N in fields.items()}
    arrays = (chunks.lay(hidden_ND), head_VD, chunks.lay(targets_N), laid, temperature, chunks.used)
    loss, logprobs_KM, entropy_KM = _token_loss(*arrays, loss_of, (chunks.width, dtype, softcap))
    return loss, lax.stop_gradient(chunks.back(logprobs_KM)), lax.stop_gradient(chunks.back(entropy_KM))


def _pass(hidden_KMD, head_VD, targets_KM, fields, temperature, used, loss_of, static):
    """((losses, log-probabilities, entropies) [K M], (gradient for hidden, for the head's transpose by shard))."""
    width, dtype, softcap = static
    shards = hidden_KMD.shape[0]
    rounded_VD = rounded(head_VD, dtype)

    def one_chunk(c, carry):
        outputs, d_hidden_KMD, d_head_KDV = carry
        hidden_SD, targets_S, fields_S = jax.tree.map(
            lambda x_KM: chunk_of(x_KM, c, width), (hidden_KMD, targets_KM, fields)
        )
        raw_SV = project_f32(hidden_SD, rounded_VD, dtype=dtype)
        logprobs_S, entropy_S, logz_S = distribution(soft_cap(raw_SV, softcap) / temperature, targets_S)
        losses_S, pull = jax.vjp(lambda *found: loss_of(*found, fields_S), logprobs_S, entropy_S)
        d_found = pull(jnp.ones_like(losses_S))
        d_raw_SV = through_logits(raw_SV, targets_S, (entropy_S, logz_S), d_found, temperature, softcap)
        d_hidden_SD, more_KDV = head_gradients(d_raw_SV, hidden_SD, rounded_VD, shards, dtype)
        found = (losses_S, logprobs_S, entropy_S)
        return (
            tuple(put_chunk(old, new, c, width) for old, new in zip(outputs, found, strict=True)),
            put_chunk(d_hidden_KMD, d_hidden_SD.astype(hidden_KMD.dtype), c, width),
            d_head_KDV + more_KDV,
        )

    nothing_KM = jnp.zeros(targets_KM.shape, jnp.float32)
    nothing = ((nothing_KM,) * 3, jnp.zeros_like(hidden_KMD), jnp.zeros((shards, *head_VD.T.shape), jnp.float32))
    outputs, d_hidden_KMD, d_head_KDV = lax.fori_loop(0, used, one_chunk, nothing)
    return outputs, (d_hidden_KMD, d_head_KDV)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _token_loss(hidden_KMD, head_VD, targets_KM, fields, temperature, used, loss_of, static):
    arrays = (hidden_KMD, head_VD, targets_KM, fields, temperature, used)
    (losses_KM, logprobs_KM, entropy_KM), _ = _pass(*arrays, loss_of, static)  # XLA drops the gradients
    return jnp.sum(losses_KM), logprobs_KM, entropy_KM


def _token_loss_fwd(hidden_KMD, head_VD, targets_KM, fields, temperature, used, loss_of, static):
    arrays = (hidden_KMD, head_VD, targets_KM, fields, temperature, used)
    (losses_KM, logprobs_KM, entropy_KM), (d_hidden_KMD, d_head_KDV) = _pass(*arrays, loss_of, static)
    found = jnp.sum(losses_KM), logprobs_KM, entropy_KM
    # Added up across devices here, once, where nothing yet waits for it.
    return found, (d_hidden_KMD, summed_head_gradient(d_head_KDV, head_VD.dtype), temperature)


def _token_loss_bwd(loss_of, static, saved, cotangents):
    d_hidden_KMD, d_head_VD, temperature = saved
    d_loss, _, _ = cotangents
    scaled = [(d_loss * x.astype(jnp.float32)).astype(x.dtype) for x in (d_hidden_KMD, d_head_VD)]
    return *scaled, None, None, jnp.zeros_like(temperature), None


_token_loss.defvjp(_token_loss_fwd, _token_loss_bwd)
