"""The loss whose gradient comes with its log-probabilities, against the one that autodiff goes back for."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.losses.logprobs import token_logprobs
from jaxrl_llm.losses.token_loss import token_loss

N, D, V = 21, 8, 29


def draw(n=N, v=V, seed=0):
    rng = np.random.default_rng(seed)
    arrays = rng.normal(size=(n, D)), rng.normal(size=(v, D)), rng.integers(0, v, n)
    fields = {"weights": rng.normal(size=n), "anchor": rng.normal(size=n) - 3}
    wanted = rng.random(n) < 0.6
    return *(x.astype(t) for x, t in zip(arrays, (np.float32, np.float32, np.int32), strict=True)), {
        name: x.astype(np.float32) for name, x in fields.items()
    } | {"wanted": wanted}


def cost(logprobs, entropy, fields):
    """Bends in both: a clipped ratio, and the entropy squared."""
    ratio = jnp.exp(jnp.clip(logprobs - fields["anchor"], -20, 20))
    each = jnp.minimum(ratio, 1.5) * logprobs - 0.3 * entropy**2
    return jnp.where(fields["wanted"], fields["weights"] * each, 0.0)


@functools.cache
def compiled(together, chunk, shards=1, softcap=None, dtype="float32"):
    def scaled(hidden, head, targets, fields, temperature):
        how = {"temperature": temperature, "chunk": chunk, "shards": shards, "softcap": softcap, "dtype": dtype}
        how["wanted_N"] = fields["wanted"]
        if together:
            loss, *found = token_loss(hidden, head, targets, fields, cost, **how)
        else:
            found = token_logprobs(hidden, head, targets, **how)
            loss = jnp.sum(cost(*found, fields))
        return -3.0 * loss + jnp.sum(head**2), (loss, *found)

    return jax.jit(jax.value_and_grad(scaled, (0, 1), has_aux=True))


@pytest.mark.parametrize(
    ("chunk", "shards", "softcap", "kind"),
    [(4, 1, None, "float32"), (5, 3, 2.0, "float32"), (100, 1, None, "bfloat16")],
    ids=["whole chunks", "shards and soft cap", "bfloat16 states, one chunk"],
)
def test_loss_and_gradient_are_those_of_the_two_passes(chunk, shards, softcap, kind):
    hidden, head, targets, fields = draw()
    hidden[~fields["wanted"]] = np.nan  # what nobody wants cannot hurt
    arrays = (jnp.asarray(hidden, kind), jnp.asarray(head, kind), targets, fields, 0.7)
    (_, wanted), wanted_gradients = compiled(False, chunk, shards, softcap)(*arrays)
    (_, found), gradients = compiled(True, chunk, shards, softcap)(*arrays)
    for got, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)
    for got, expected in zip(gradients, wanted_gradients, strict=True):
        assert got.dtype == expected.dtype
        # In bfloat16 the unscaled gradient is rounded once more.
        rtol, atol = (1e-5, 2e-5) if kind == "float32" else (2**-6, 2**-6 * float(jnp.abs(expected).max()))
        np.testing.assert_allclose(got.astype(jnp.float32), expected.astype(jnp.float32), rtol=rtol, atol=atol)
    assert min(float(jnp.abs(g).max()) for g in wanted_gradients) > 1


def test_the_results_beside_the_loss_have_no_gradient_and_nothing_is_trained_where_nothing_is_wanted():
    hidden, head, targets, fields = draw()

    def entropies(hidden, wanted):
        how = {"temperature": 1.0, "chunk": 4, "wanted_N": wanted}
        loss, logprobs, entropy = token_loss(hidden, head, targets, fields | {"wanted": wanted}, cost, **how)
        return jnp.sum(logprobs) + jnp.sum(entropy) + 0 * loss

    gradient = jax.jit(jax.grad(entropies))
    np.testing.assert_array_equal(gradient(hidden, fields["wanted"]), 0)
    (loss, found), gradients = compiled(True, 4)(hidden, head, targets, fields | {"wanted": np.zeros(N, bool)}, 1.0)
    np.testing.assert_array_equal(gradients[0], 0)
    np.testing.assert_allclose(gradients[1], 2 * head)
    assert float(loss) == pytest.approx((head**2).sum())
    assert all((x == 0).all() for x in found)


def test_the_head_multiplies_three_times_in_float32_at_the_highest_precision_and_never_holds_all_logits():
    n, v, chunk = 64, 101, 16
    lowered = compiled(True, chunk).lower(*draw(n, v), 1.0)
    dots = [line for line in lowered.as_text().splitlines() if "dot_general" in line]
    assert len(dots) == 3  # compiled(False) has 4
    for line in dots:
        assert "precision = [HIGHEST, HIGHEST]" in line
        assert re.findall(r"x(f32|bf16|f64)>", line) == ["f32"] * 3
    sizes = re.findall(r"\b(?:f32|bf16|pred)\[([\d,]+)\]", lowered.compile().as_text())
    elements = {math.prod(map(int, dims.split(","))) for dims in sizes}
    assert chunk * v in elements
    assert max(elements) < n * v // 2


@pytest.mark.parametrize(("shape", "head_spec"), [((8, 1), P()), ((2, 4), P("tensor", None))], ids=["data", "both"])
def test_sharded_equals_unsharded(cpu_devices, shape, head_spec):
    mesh = jax.make_mesh(shape, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=cpu_devices)
    hidden, head, targets, fields = draw(64, 40)

    def on(x, *axes):
        return jax.device_put(x, NamedSharding(mesh, P(*axes)))

    by_token = {name: on(x, "data") for name, x in fields.items()}
    placed = (on(hidden, "data", None), on(head, *head_spec), on(targets, "data"), by_token, 0.8)
    program = compiled(True, 16, shape[0]).lower(*placed).compile()
    (_, found), gradients = program(*placed)
    (_, plain), plain_gradients = compiled(True, 16)(hidden, head, targets, fields, 0.8)
    for got, wanted in zip((*found, *gradients), (*plain, *plain_gradients), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    if head_spec == P():
        # Every device works on its own tokens; loss and head's gradient are added up once, after the loop over chunks.
        inside, outside = program.as_text().split("\nENTRY")
        assert "all-reduce" not in inside
        assert re.search(r"f32\[8,40\]\S*[ ,].*all-reduce\(", outside)
