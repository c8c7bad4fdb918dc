"""The devices a command runs on, chosen before JAX's backend is up."""

from typing import Any

import jax

from jaxrl_llm.config import DeviceConfig


def configure_jax(device: DeviceConfig) -> None:
    """Tell JAX which platform to use and how many virtual CPU devices to make."""
    wanted: dict[str, Any] = {"jax_num_cpu_devices": device.cpu_devices}
    if device.platform == "cpu":
        wanted["jax_platforms"] = "cpu"
    for name, value in wanted.items():
        if getattr(jax.config, name) != value:  # JAX refuses any update once its backend is up
            jax.config.update(name, value)
