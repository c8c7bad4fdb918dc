"""Compiling for accelerators that are not there: devices of a named topology, and what a program needs on each chip.

XLA's TPU compiler comes with libtpu and its GPU compiler with JAX's CUDA plugin; both run on a CPU machine.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.errors import JaxRuntimeError
from jax.experimental import topologies

from jaxrl_llm.types import UserError

TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""What libtpu must find in the environment, before it is loaded, to compile where no TPU is."""

_GIB = 2**30
# Public figures of the SXM5 board (NVIDIA's H100 data sheet and CUDA's table of compute capability 9.0).
_H100 = f"""
platform_name: "CUDA"
device_description_str: "NVIDIA H100"
gpu_device_info {{
  cuda_compute_capability {{ major: 9 minor: 0 }}
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: {80 * _GIB}
  memory_bandwidth: 3350000000000
  l2_cache_size: {50 * 2**20}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: {48 * 2**10}
  shared_memory_per_block_optin: {227 * 2**10}
  shared_memory_per_core: {228 * 2**10}
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
"""
_GPUS = {"h100": (_H100, 80 * _GIB)}


@dataclass(frozen=True)
class Topology:
    """Devices to compile for; `memory` is the bytes of one, unless the compiler itself refuses what exceeds them."""

    name: str
    devices: list[jax.Device]
    memory: int | None
    compiler_options: dict[str, Any]


@dataclass(frozen=True)
class Program:
    """A compiled program: seconds of compilation, and bytes on one device (donated arguments counted once)."""

    name: str
    seconds: float
    argument_bytes: int
    peak_bytes: int
    compiled: jax.stages.Compiled


def topology(name: str) -> Topology:
    """The devices of `name`: a TPU slice (v5e:2x2, v5p:2x2x4, v6e:4x4, ...) or `h100:N`, N GPUs of one host.

    `TPU_ENVIRONMENT` must be in the environment. Raises UserError on an unknown name, and if the compiler of that
    platform is not installed.
    """
    kind, _, shape = name.partition(":")
    if not re.fullmatch(r"\d+(x\d+)*", shape):
        raise UserError(f"topology {name!r} is not of the form KIND:SHAPE, for example v5e:2x2 or h100:8")
    try:
        if kind in _GPUS:
            return _gpus(name, *_GPUS[kind], shape)
        found = topologies.get_topology_desc(platform="tpu", topology_name=name)
    # JAX's own words where a platform's compiler is missing: RuntimeError for TPU, NotImplementedError for GPU.
    except (JaxRuntimeError, RuntimeError, NotImplementedError) as error:
        if isinstance(error, JaxRuntimeError):
            raise UserError(f"topology {name} is refused by the compiler: {_first_line(error)}") from None
        raise UserError(
            f"topology {name}: the compiler of that platform is not installed here; `make aot` installs it"
        ) from None
    return Topology(name, list(found.devices), None, {})


def _gpus(name: str, description: str, memory: int, shape: str) -> Topology:
    if not shape.isdigit() or shape == "0":
        raise UserError(f"topology {name}: a GPU's shape is how many there are, for example h100:8")
    # Slices, hosts of a slice, GPUs of a host.
    found = topologies.get_topology_desc(platform="cuda", target_config=description, topology=f"1x1x{shape}")
    # Autotuning would run candidates on a device.
    return Topology(name, list(found.devices), memory, {"xla_gpu_autotune_level": 0})


def compile_program(name: str, lower: Callable[[], jax.stages.Lowered], where: Topology, way_out: str) -> Program:
    """Lower and compile one program for a topology.

    Raises UserError with the compiler's figures and `way_out` if it does not fit a device, and with JAX's words if
    the program has no form there.
    """
    start = time.monotonic()
    try:
        compiled = lower().compile(where.compiler_options)
    except NotImplementedError as error:  # JAX's, of a kernel without a form for this platform
        raise UserError(f"the {name} cannot be compiled for {where.name}: {_first_line(error)}") from None
    except RuntimeError as error:
        if "cuDNN is not detected" in str(error):
            raise UserError(f"the {name} needs cuDNN to be compiled for {where.name}; `make aot` installs it") from None
        if "HbmOom" not in str(error) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        # Two of its phrasings: "Used 48.00G of 15.75G hbm", "(73.05G) exceeds available HBM (15.75G)".
        used = re.search(r"([\d.]+[KMGT])\)?(?: of | exceeds available HBM \()([\d.]+[KMGT])", str(error))
        figures = f"{used[1]} of {used[2]}" if used else _first_line(error)
        raise UserError(_too_large(name, where, figures, way_out)) from None
    seconds = time.monotonic() - start
    memory: Any = compiled.memory_analysis()
    peak = memory.peak_memory_in_bytes or (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )
    if where.memory is not None and peak > where.memory:
        figures = f"{peak / _GIB:.2f}G of {where.memory / _GIB:.2f}G"
        raise UserError(_too_large(name, where, figures, way_out))
    return Program(name, seconds, memory.argument_size_in_bytes, peak, compiled)


def _too_large(name: str, where: Topology, figures: str, way_out: str) -> str:
    return f"the {name} does not fit a device of {where.name}: it needs {figures}; {way_out}"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300]
