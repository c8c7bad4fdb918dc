"""Strict by default: 8 virtual CPU devices, no silent rank promotion, warnings are errors (pyproject.toml)."""

import os
import tempfile
from importlib.metadata import version

# Programs that several tests (and the processes they start) compile alike are compiled once per session.
# Through the environment, and before JAX is imported, so that workers and child processes share the folder too.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _COMPILED = tempfile.TemporaryDirectory(prefix="jaxrl-compiled-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _COMPILED.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    # Nearly all of the suite's time is XLA compiling programs that then run for milliseconds. Without the newer
    # emitters of fusions it takes a third less; XLA of JAX 0.12 has no others, and ends over a flag it does not know.
    fast_to_compile = " --xla_backend_optimization_level=0"
    if version("jaxlib").startswith("0.10."):
        fast_to_compile += " --xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + fast_to_compile

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
