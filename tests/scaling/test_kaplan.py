"""Kaplan et al.: published constants and identities."""

import numpy as np
import pytest

from jaxrl_llm.scaling import kaplan


def test_published_values():
    # (8.8e13/1e9)^.076 and so on, worked with logarithms to base 10.
    assert kaplan.power(1e9, kaplan.N_C, kaplan.ALPHA_N) == pytest.approx(10 ** (0.076 * np.log10(8.8e4)), abs=1e-9)
    assert kaplan.power(1e10, kaplan.D_C, kaplan.ALPHA_D) == pytest.approx(10 ** (0.095 * np.log10(5.4e3)), abs=1e-9)
    in_days = kaplan.power(1e4, kaplan.C_C_PF_DAYS, kaplan.ALPHA_C)
    assert in_days == pytest.approx(10 ** (0.05 * np.log10(3.1e4)), abs=1e-9)
    in_flops = kaplan.power(1e4 * kaplan.PF_DAY, kaplan.C_C_PF_DAYS * kaplan.PF_DAY, kaplan.ALPHA_C)
    assert in_flops == pytest.approx(in_days, abs=1e-9)


def test_both():
    N, D = 1e9, 2e10
    N_c, alpha_N, D_c, alpha_D = kaplan.BOTH
    assert (N_c, alpha_N, D_c, alpha_D) == (6.4e13, 0.076, 1.8e13, 0.103)
    by_hand = ((6.4e13 / N) ** (0.076 / 0.103) + 1.8e13 / D) ** 0.103
    assert kaplan.loss(N, D, *kaplan.BOTH) == pytest.approx(by_hand, abs=1e-9)


def test_limits_of_both_are_the_laws_of_one():
    assert kaplan.loss(1e9, 1e30, *kaplan.BOTH) == pytest.approx(kaplan.power(1e9, 6.4e13, 0.076), abs=1e-9)
    assert kaplan.loss(1e40, 1e9, *kaplan.BOTH) == pytest.approx(kaplan.power(1e9, 1.8e13, 0.103), abs=1e-9)


def test_scale_is_where_the_loss_is_one_and_the_inverse():
    assert kaplan.power(kaplan.N_C, kaplan.N_C, kaplan.ALPHA_N) == pytest.approx(1.0, abs=1e-12)
    X = np.geomspace(1e6, 1e12, 5)
    np.testing.assert_allclose(kaplan.power_inverse(kaplan.power(X, 8.8e13, 0.076), 8.8e13, 0.076), X, rtol=1e-9)


def test_ten_times_the_size_is_a_fixed_factor():
    ratio = kaplan.power(1e10, kaplan.N_C, kaplan.ALPHA_N) / kaplan.power(1e9, kaplan.N_C, kaplan.ALPHA_N)
    assert ratio == pytest.approx(10**-0.076, abs=1e-9)
