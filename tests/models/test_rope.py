"""Rotary frequencies of every scaling, worked by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.config import ModelConfig, RopeScalingConfig
from jaxrl_llm.models.rope import rope_frequencies, rotate, rotations

LLAMA3 = {"kind": "llama3", "factor": 8, "original_context": 16, "low_freq_factor": 1, "high_freq_factor": 4}
YARN = {"kind": "yarn", "factor": 4, "original_context": 4096, "beta_fast": 32, "beta_slow": 1}


def frequencies(theta=10000.0, head_dim=4, max_context=16, **scaling):
    return rope_frequencies(theta, head_dim, RopeScalingConfig(**scaling), max_context)


def test_frequencies_of_every_scaling():
    for (found, factor), wanted in [
        (frequencies(), [1.0, 0.01]),
        (frequencies(kind="linear", factor=4), [0.25, 0.0025]),
        # Twice the original context, factor 2: theta * (2 * 2 - 1)^(4 / 2) = 90000, whose root is 300.
        (frequencies(kind="dynamic", factor=2, original_context=8), [1.0, 1 / 300]),
        (frequencies(kind="dynamic", factor=2, original_context=16), [1.0, 0.01]),
        (frequencies(kind="dynamic", factor=2, original_context=64), [1.0, 0.01]),
        # 16 positions at 1 radian are 2.5465 turns, between 1 and 4: a share of .51549 is kept, the rest over 8.
        (frequencies(**LLAMA3), [0.51549 + 0.48451 / 8, 0.00125]),
        # 64 positions are 10.2 turns: kept whole.
        (frequencies(**LLAMA3 | {"original_context": 64}), [1.0, 0.00125]),
    ]:
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
        assert found.dtype == np.float32
        assert factor == 1.0


def test_yarn_ramps_over_whole_pairs_and_scales_the_vectors():
    # Pair i turns 4096 * 10^-i / 2 pi times: 32 times at i = 1.309, once at 2.814; the ramp goes from pair 1 to pair 3.
    found, factor = frequencies(head_dim=8, **YARN, attention_factor=1.25)
    np.testing.assert_allclose(found, [1.0, 0.1, (0.01 + 0.0025) / 2, 0.00025], rtol=1e-6)
    assert factor == 1.25


def test_a_rotation_turns_each_pair_by_its_angle_and_applies_the_factor():
    # Width 2: one pair (1, 0), turned by the position in radians.
    config = ModelConfig(heads=1, kv_heads=1, head_dim=2, rope_scaling={**YARN, "attention_factor": 2.0})
    found = rotations(config, jnp.array([0, 3]))
    assert list(found) == ["G"]
    turn = found["G"]
    turned = rotate(jnp.array([[[1.0, 0.0]], [[1.0, 0.0]]]), turn)
    np.testing.assert_allclose(turned[:, 0], [[2.0, 0.0], [2 * np.cos(3.0), 2 * np.sin(3.0)]], rtol=1e-6)


def test_local_layers_have_a_base_of_their_own_without_scaling():
    config = ModelConfig(
        attention_pattern="LG", window=4, local_rope_theta=100.0, rope_scaling={"kind": "linear", "factor": 2}
    )
    found = rotations(config, jnp.array([1]))
    turn, local = found["G"], found["L"]
    pairs = np.arange(8) / 8
    np.testing.assert_allclose(turn.cos[0, 0], np.cos(10000.0**-pairs / 2), rtol=1e-6)
    np.testing.assert_allclose(local.cos[0, 0], np.cos(100.0**-pairs), rtol=1e-6)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"kind": "llama3", "factor": 8}, "original_context is missing"),
        (LLAMA3 | {"kind": "yarn"}, "beta_fast is missing|low_freq_factor is not a constant of yarn"),
        ({"factor": 2}, "kind is none"),
        ({**LLAMA3, "beta_fast": 3}, "beta_fast is not a constant of llama3"),
        ({**LLAMA3, "low_freq_factor": 5}, "not below"),
        ({**YARN, "attention_factor": 1, "beta_slow": 32}, "not below"),
        ({"kind": "linear", "factor": 0.5}, "greater than or equal to 1"),
    ],
)
def test_constants_that_do_not_belong_together_are_refused(scaling, message):
    with pytest.raises(ValueError, match=message):
        RopeScalingConfig(**scaling)
