"""Where arrays live: one table from logical axes to mesh axes, mesh making, and the split of one host's devices."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.types import UserError

MESH_AXES = ("data", "fsdp", "expert", "context", "tensor")
"""Every mesh has all of these, in this order; an axis the config leaves out has size 1."""

Rules = Mapping[str, str | tuple[str, ...] | None]

RULES: Rules = {
    "batch": ("data", "fsdp", "expert"),
    "time": "context",
    "pieces": ("data", "fsdp", "expert", "context"),
    "embed": "fsdp",
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "experts": "expert",
    "router": None,
    "layers": None,
    "head_dim": None,
    "norm": None,
    "rank": None,
}


_CONFIG_WORDS = {"embed": "d_model", "mlp": "d_ff", "vocab": "vocab_size"}
"""What users call the logical axes that have another name in the configuration."""


def _mesh_axes(placed: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if placed is None else (placed,) if isinstance(placed, str) else placed


def spec(axes: Sequence[str | None], rules: Rules = RULES) -> PartitionSpec:
    """The partition of an array whose dimensions are the logical `axes`; None is a dimension never split.

    Raises UserError on a logical axis without a rule, and on a mesh axis that two dimensions would use.
    """
    if unknown := sorted({axis for axis in axes if axis is not None and axis not in rules}):
        raise UserError(
            f"logical axes {unknown} have no sharding rule; add them to the table, which has {sorted(rules)}"
        )
    placed = [None if axis is None else rules[axis] for axis in axes]
    users: dict[str, list[str]] = {}
    for axis, place in zip(axes, placed, strict=True):
        for mesh_axis in _mesh_axes(place):
            users.setdefault(mesh_axis, []).append(str(axis))
    for mesh_axis, names in users.items():
        if len(names) > 1:
            raise UserError(
                f"mesh axis {mesh_axis!r} would split both {' and '.join(names)} of one array; change one rule"
            )
    return PartitionSpec(*placed)


def parts(mesh: Mesh | None, axis: str) -> int:
    """Over how many devices the mesh splits the logical `axis`; None is one device."""
    return 1 if mesh is None else math.prod(mesh.shape[name] for name in _mesh_axes(RULES[axis]))


def _product(mesh_axes: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in mesh_axes.items())


def _checked_axes(axes: Mapping[str, int], what: str) -> dict[str, int]:
    """All mesh axes with their sizes, -1 kept; refuses unknown names and impossible sizes."""
    if unknown := sorted(set(axes) - set(MESH_AXES)):
        raise UserError(f"{what} has unknown axes {unknown}; the known ones are {list(MESH_AXES)}")
    for name, size in axes.items():
        if size < 1 and size != -1:
            raise UserError(f"{what} gives axis {name} the size {size}; use a positive number, or -1 for what is left")
    if sum(size == -1 for size in axes.values()) > 1:
        raise UserError(f"{what} has more than one axis of size -1 ({_product(axes)}); only one can take what is left")
    return {name: axes.get(name, 1) for name in MESH_AXES}


def _fixed_devices(axes: Mapping[str, int]) -> int:
    return math.prod(size for size in axes.values() if size != -1)


def make_mesh(axes: Mapping[str, int], devices: Sequence[jax.Device]) -> Mesh:
    """A mesh of exactly `devices` with all of MESH_AXES; one of `axes` may be -1 and takes what the others leave.

    Axis types are Auto: with Explicit ones (the default of `jax.make_mesh`) a contraction over a sharded axis is an
    error until its output's sharding is written out.
    Where the devices are in several TPU slices, only the axis `data` crosses from one to another.
    Raises UserError on an unknown axis, a bad size, sizes whose product is not the number of devices, or a `data` that
    the slices do not divide.
    """
    sizes = _checked_axes(axes, "the mesh")
    fixed, count = _fixed_devices(sizes), len(devices)
    if -1 in sizes.values():
        if count % fixed:
            raise UserError(f"mesh {_product(axes)} does not divide {count} devices; the fixed axes take {fixed}")
        sizes = {name: count // fixed if size == -1 else size for name, size in sizes.items()}
    elif fixed != count:
        raise UserError(
            f"mesh {_product(axes)} has {fixed} places for {count} devices; change an axis, or set one to -1"
        )
    try:
        if len(_slices(devices)) > 1:
            return Mesh(slice_grid(sizes, devices), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
        return jax.make_mesh(
            tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), devices=list(devices)
        )
    except (AssertionError, NotImplementedError):  # JAX's answer to TPU chips that make no such block
        raise UserError(
            f"mesh {_product(sizes)} cannot be laid over {count} chips of this TPU slice; use as many as make a "
            "rectangle of it, or swap sizes between axes"
        ) from None


def _slices(devices: Sequence[Any]) -> dict[int, list[Any]]:
    """TPU devices by slice, in order. Elsewhere all are one: what JAX calls a slice on GPUs is one host's."""
    slices: dict[int, list[Any]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", 0) if device.platform == "tpu" else 0, []).append(device)
    return dict(sorted(slices.items()))


def slice_grid(sizes: Mapping[str, int], devices: Sequence[Any]) -> np.ndarray:
    """Devices of several slices in the shape of the mesh `sizes`: each slice holds its own consecutive part of `data`,
    and all of every other axis.

    Raises UserError if `data` is not a multiple of the slices, or if these have unequal numbers of devices.
    """
    slices = _slices(devices)
    counts = {index: len(members) for index, members in slices.items()}
    if len(set(counts.values())) > 1:
        raise UserError(
            f"the mesh {_product(sizes)} takes {counts} devices (by slice); it must take as many of each slice"
        )
    if sizes["data"] % len(slices):
        raise UserError(
            f"mesh {_product(sizes)}: its devices are in {len(slices)} slices, and only axis data may cross slices, so "
            f"data {sizes['data']} must be a multiple of {len(slices)}"
        )
    inside = [size // len(slices) if name == "data" else size for name, size in sizes.items()]
    across = [len(slices) if name == "data" else 1 for name in sizes]
    # As jax.make_mesh does for one slice.
    return mesh_utils.create_hybrid_device_mesh(inside, across, list(devices), allow_split_physical_axes=True)


def split_devices(
    devices: Sequence[jax.Device], trainer_mesh: Mapping[str, int], sampler_mesh: Mapping[str, int]
) -> tuple[list[jax.Device], list[jax.Device]]:
    """The trainer's devices (the first ones) and the sampler's (those after them), by the sizes of their meshes.

    A mesh with an axis of -1 takes what the other one leaves. On a single device both share it. Devices that neither
    mesh asks for stay idle.
    Raises UserError if the devices are too few, or if both meshes ask for what is left.
    """
    trainer, sampler = _checked_axes(trainer_mesh, "train.mesh"), _checked_axes(sampler_mesh, "sampler.mesh")
    count, trainer_count, sampler_count = len(devices), _fixed_devices(trainer), _fixed_devices(sampler)
    if count == 1 and trainer_count == sampler_count == 1:
        return list(devices), list(devices)
    if -1 in trainer.values() and -1 in sampler.values():
        raise UserError("train.mesh and sampler.mesh both have an axis of size -1; only one can take what is left")
    if trainer_count + sampler_count > count:
        raise UserError(
            f"train.mesh ({_product(trainer_mesh)}) needs {trainer_count} devices and sampler.mesh "
            f"({_product(sampler_mesh)}) {sampler_count}, but there are {count}; make a mesh smaller, or on the CPU "
            f"backend raise device.cpu_devices"
        )
    if -1 in trainer.values():
        trainer_count = _largest_multiple(count - sampler_count, trainer_count)
    elif -1 in sampler.values():
        sampler_count = _largest_multiple(count - trainer_count, sampler_count)
    return list(devices[:trainer_count]), list(devices[trainer_count : trainer_count + sampler_count])


def own_devices(devices: Sequence[jax.Device], mesh: Mapping[str, int], whose: str) -> list[jax.Device]:
    """The devices of a sampler without a trainer, or the other way round: the first ones, as many as its mesh asks for.

    Raises UserError, naming `whose` mesh it is, if they are too few.
    """
    axes = _checked_axes(mesh, whose)
    needed, count = _fixed_devices(axes), len(devices)
    if needed > count:
        raise UserError(
            f"{whose} ({_product(mesh)}) needs {needed} devices, but there are {count}; make it smaller, "
            f"or on the CPU backend raise device.cpu_devices"
        )
    return list(devices[: _largest_multiple(count, needed) if -1 in axes.values() else needed])


def _largest_multiple(available: int, of: int) -> int:
    return available // of * of


def check_divides(
    mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int], what: str, rules: Rules = RULES
) -> None:
    """Refuses (UserError) an array of this shape that the mesh cannot split evenly, naming dimension and mesh axes."""
    for axis, size in zip(axes, shape, strict=True):
        parts = {name: mesh.shape[name] for name in _mesh_axes(rules[axis] if axis is not None else None)}
        parts = {name: count for name, count in parts.items() if count > 1}
        if size % math.prod(parts.values()):
            raise UserError(
                f"{what}: {_CONFIG_WORDS.get(str(axis), axis)} {size} does not divide over {_product(parts)}; "
                f"use a multiple of {math.prod(parts.values())}, or a smaller mesh axis"
            )


def param_shardings(mesh: Mesh, logical_axes: Any, abstract: Any, rules: Rules = RULES, whose: str = "") -> Any:
    """A tree of NamedSharding for the tree `abstract` (anything with shapes), whose dimensions `logical_axes` names.

    Raises UserError naming the leaf and dimension if the mesh, which the user knows as `whose`, does not divide it.
    """

    def place(path, leaf, axes):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        check_divides(mesh, axes, leaf.shape, f"{whose}: {name}" if whose else name, rules)
        return NamedSharding(mesh, spec(axes, rules))

    return jax.tree_util.tree_map_with_path(place, abstract, logical_axes)


def placed(abstract: Any, shardings: Any) -> Any:
    """The tree `abstract` (anything with shapes and dtypes) as `jax.ShapeDtypeStruct`s that carry their shardings."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device of the mesh holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def rows_sharding(mesh: Mesh, leading: int = 0) -> NamedSharding:
    """The sharding of [..., B, T] arrays: rows over the batch axes, their tokens over `context`, `leading` dimensions
    before them whole."""
    return NamedSharding(mesh, spec((*(None,) * leading, "batch", "time")))


def whole_rows_sharding(mesh: Mesh, leading: int = 0) -> NamedSharding:
    """`rows_sharding` with all tokens of a row on each device of its `context` group."""
    return NamedSharding(mesh, spec((*(None,) * leading, "batch", None)))


def check_rows(mesh: Mesh, shape: Sequence[int], rows: str, length: str) -> None:
    """Refuses (UserError) rows of shape (B, T) that the mesh cannot split evenly; `rows` and `length` name B and T."""
    check_divides(mesh, ("batch", None), shape, rows)
    check_divides(mesh, (None, "time"), shape, length)


def check_whole_rows(mesh: Mesh, what: str) -> None:
    """Refuses (UserError) a mesh that splits tokens over `context` where nobody can."""
    if (size := parts(mesh, "time")) > 1:
        raise UserError(
            f"{what} has context {size}, but only the trainer splits the tokens of a row; give these devices to data, "
            "fsdp or tensor"
        )


def pieces(mesh: Mesh | None, x_BT: jax.Array) -> jax.Array:
    """[B T ...] -> [B*c T/c ...], c devices along `context`: every device's own tokens as rows of their own.

    What treats tokens one by one then sees rows split over all batch axes and `context` in contiguous blocks, as in
    plain data parallelism, and may flatten them. Nothing moves; c = 1 returns the argument. The rows' order depends on
    the mesh: `joined` undoes it.
    """
    return _relabelled(mesh, x_BT, ("batch", "time"), ("pieces", None))


def joined(mesh: Mesh | None, x_PT: jax.Array) -> jax.Array:
    """The inverse of `pieces`."""
    return _relabelled(mesh, x_PT, ("pieces", None), ("batch", "time"))


def _relabelled(
    mesh: Mesh | None, x: jax.Array, axes: Sequence[str | None], as_axes: Sequence[str | None]
) -> jax.Array:
    if mesh is None or parts(mesh, "time") == 1:
        return x
    # A reshape would do if the partitioner were told the order of the axes; this says that no device's part changes.
    return jax.shard_map(lambda part: part, mesh=mesh, in_specs=spec(axes), out_specs=spec(as_axes))(x)
