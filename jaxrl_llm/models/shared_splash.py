"""Splash attention of tokens that look at their own document and at a prompt that other documents of the row share.

Splash compares one segment id per query with one per key. So its kernel runs twice, and the two softmaxes become one:

    out = sum_i exp(z_i - z) out_i     z = log sum_i exp(z_i)     z_i the logsumexp of the scores of run i

Going backward, a kernel that is given the whole's `out` and `z` instead of its own works out its keys' part of the
whole's gradient: probabilities exp(score - z), and d score = p (d p - out . d out).

Suffixes: T queries, U keys, H query heads, K key heads, C head width; one row.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jaxtyping import Array, Float, Int

Kernel = splash.SplashAttentionKernel


@jax.custom_vjp
def attend_twice(
    kernel: Kernel,
    q_HTC: Float[Array, "H T C"],
    k_KUC: Float[Array, "K U C"],
    v_KUC: Float[Array, "K U C"],
    own_T: Int[Array, " T"],
    prompts_T: Int[Array, " T"],
    segments_U: Int[Array, " U"],
) -> Float[Array, "H T C"]:
    """Attention over the keys that the kernel's mask allows and whose segment is the query's own or its prompt.

    The two must differ; a prompt id that no key has adds nothing. Every query needs a key of its own segment.
    """
    return _forward(kernel, q_HTC, k_KUC, v_KUC, own_T, prompts_T, segments_U)[0]


def _forward(kernel, q_HTC, k_KUC, v_KUC, own_T, prompts_T, segments_U):
    both = Kernel(kernel.fwd_mask_info, None, None, **(kernel.kwargs | {"save_residuals": True}))

    def run(ids_T):
        out_HTC, (z_HT,) = both(q_HTC, k_KUC, v_KUC, segment_ids=splash.SegmentIds(ids_T, segments_U))
        return out_HTC.astype(jnp.float32), z_HT

    # A query that sees nothing has a logsumexp near the least float32, and so no weight.
    (own_HTC, own_HT), (prompt_HTC, prompt_HT) = run(own_T), run(prompts_T)
    z_HT = jnp.logaddexp(own_HT, prompt_HT)
    out_HTC = jnp.exp(own_HT - z_HT)[..., None] * own_HTC + jnp.exp(prompt_HT - z_HT)[..., None] * prompt_HTC
    out_HTC = out_HTC.astype(q_HTC.dtype)
    return out_HTC, (kernel, q_HTC, k_KUC, v_KUC, own_T, prompts_T, segments_U, out_HTC, z_HT)


def _backward(saved, d_out_HTC):
    kernel, q_HTC, k_KUC, v_KUC, own_T, prompts_T, segments_U, out_HTC, z_HT = saved
    how = kernel.kwargs

    def run(ids_T):
        ids = splash.SegmentIds(ids_T, segments_U)
        masks = (kernel.dq_mask_info, kernel.dkv_mask_info)
        # Not public: the public kernel goes backward from its own output alone.
        gradients = splash._splash_attention_bwd(
            False,
            how["mask_value"],
            how["is_mqa"],
            how["block_sizes"],
            None,
            how["mask_function"],
            how["attn_logits_soft_cap"],
            how["interpret"],
            (q_HTC, k_KUC, v_KUC, ids, None, out_HTC, z_HT, *masks),
            d_out_HTC,
        )
        return gradients[3:6]  # of queries, keys and values

    return None, *jax.tree.map(jnp.add, run(own_T), run(prompts_T)), None, None, None


attend_twice.defvjp(_forward, _backward)
