"""Strict by default: 8 virtual CPU devices, no silent rank promotion, warnings are errors (pyproject.toml)."""

import jax
import pytest
from hypothesis import HealthCheck, settings

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Compilation dwarfs a single example, so a deadline would only report noise.
settings.register_profile("fast", max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("nightly", max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fast")


@pytest.fixture(scope="session")
def cpu_devices():
    devices = jax.devices()
    assert len(devices) == 8
    return devices
