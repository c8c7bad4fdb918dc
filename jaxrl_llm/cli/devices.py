"""The devices and the processes a command runs on, settled before JAX's backend is up."""

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxrl_llm.cli.rendezvous import Facts, is_loopback, meet
from jaxrl_llm.config import DeviceConfig
from jaxrl_llm.types import UserError
from jaxrl_llm.world import World

# After which a process that no longer answers counts as dead, and the others end.
_HEARTBEAT_S, _SHUTDOWN_S = 60, 30

_VARIABLES = {"coordinator": "JAXRL_COORDINATOR", "processes": "JAXRL_PROCESSES", "process_id": "JAXRL_PROCESS_ID"}


def configure_jax(device: DeviceConfig) -> None:
    """Tell JAX which platform to use and how many virtual CPU devices to make."""
    wanted: dict[str, Any] = {"jax_num_cpu_devices": device.cpu_devices}
    if device.platform == "cpu":
        wanted["jax_platforms"] = "cpu"
    for name, value in wanted.items():
        if getattr(jax.config, name) != value:  # JAX refuses any update once its backend is up
            jax.config.update(name, value)


@dataclass(frozen=True)
class Place:
    """Which process of how many this is, and where the first one is reached."""

    index: int = 0
    count: int = 1
    address: tuple[str, int] = ("", 0)
    local_devices: list[int] | None = None


def own_place(device: DeviceConfig, environment: Mapping[str, str] = os.environ) -> Place:
    """This process's place by `device.distributed`, by the environment where a key is null, or by JAX's detection.

    Raises UserError if something is missing, contradicts itself, or nothing was detected.
    """
    given = {key: getattr(device.distributed, key) for key in _VARIABLES}
    for key, variable in _VARIABLES.items():
        if given[key] is None and variable in environment:
            given[key] = environment[variable] if key == "coordinator" else _number(variable, environment[variable])
    coordinator = given.pop("coordinator")
    if coordinator is None:
        if named := [f"device.distributed.{key}" for key, value in given.items() if value is not None]:
            raise UserError(
                f"{' and '.join(named)} (or {', '.join(_VARIABLES.values())}) are set without a coordinator; set "
                "device.distributed.coordinator to process 0's host:port, or to auto"
            )
        return Place()
    if coordinator == "auto":
        return _detected(device, given)
    for key, value in given.items():
        if value is None:
            raise UserError(
                f"device.distributed.coordinator = {coordinator}, but device.distributed.{key} is not set and the "
                f"environment has no {_VARIABLES[key]}; give it, or coordinator: auto on a cluster that JAX knows"
            )
    return _place(coordinator, given["processes"], given["process_id"])


def _number(variable: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"environment variable {variable} = {text!r} is not a whole number") from None


def _place(coordinator: str, count: int, index: int, local_devices: list[int] | None = None) -> Place:
    host, colon, port = coordinator.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise UserError(f"device.distributed.coordinator = {coordinator!r} is not of the form host:port, nor auto")
    if count < 1 or not 0 <= index < count:
        raise UserError(
            f"process {index} of {count} cannot be: processes are numbered from 0 to device.distributed.processes - 1"
        )
    return Place(index, count, (host, int(port)), local_devices)


def _detected(device: DeviceConfig, given: Mapping[str, int | None]) -> Place:
    # What jax.distributed.initialize calls itself. It is asked first because its own start-up ends the process from C++
    # if somebody is missing.
    from jax._src.clusters import ClusterEnv

    if set_too := [f"device.distributed.{key}" for key, value in given.items() if value is not None]:
        raise UserError(f"device.distributed.coordinator = auto finds out {' and '.join(set_too)} itself; leave it out")
    seconds = int(device.distributed.timeout_s)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about clusters that this is not; the error below says what to do
            found = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, seconds)
    except (RuntimeError, ValueError, OSError, LookupError) as error:
        raise UserError(
            f"device.distributed.coordinator = auto: the cluster does not say who is here ({error}); give coordinator "
            "(host:port), processes and process_id, in the environment for instance"
        ) from None
    coordinator, count, index, local_devices = found
    if coordinator is None or count is None or index is None:
        raise UserError(
            "device.distributed.coordinator = auto, but this is no cluster that JAX detects (Slurm, Cloud TPU, Open "
            f"MPI, Kubernetes with its Python package); set {', '.join(_VARIABLES.values())}"
        )
    return _place(coordinator, count, index, list(local_devices) if local_devices is not None else None)


def join_processes(device: DeviceConfig, place: Place, facts: Facts) -> World:
    """The processes of this run, connected; alone where `place` is one of one. Before JAX's backend is up.

    Raises UserError, in every process and within `device.distributed.timeout_s` seconds, if they do not all come or
    differ in `facts`.
    """
    if place.count == 1:
        return World()
    meet(place.address, place.index, place.count, facts, timeout_s=device.distributed.timeout_s)
    host, port = place.address
    # SIGTERM is ours: train and sft agree on the step after which they stop.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        f"{host}:{port}",
        place.count,
        place.index,
        local_device_ids=place.local_devices,
        cluster_detection_method="deactivate",
        initialization_timeout=max(1, int(device.distributed.timeout_s)),
        heartbeat_timeout_seconds=_HEARTBEAT_S,
        shutdown_timeout_seconds=_SHUTDOWN_S,
        # JAX would listen on every interface of the machine.
        coordinator_bind_address=f"{host}:{port}" if is_loopback(host) else None,
    )
    from jax._src import distributed  # its key-value store has no public name

    return World(place.index, place.count, distributed.global_state.client)
