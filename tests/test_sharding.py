from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxrl_llm.sharding import (
    RULES,
    check_whole_rows,
    joined,
    make_mesh,
    own_devices,
    param_shardings,
    pieces,
    slice_grid,
    spec,
    split_devices,
)
from jaxrl_llm.types import UserError

D8 = list(range(8))


def test_the_table_places_every_logical_axis():
    assert spec(("batch", "time")) == PartitionSpec(("data", "fsdp", "expert"), "context")
    assert spec(("pieces", None)) == PartitionSpec(("data", "fsdp", "expert", "context"), None)
    assert spec(("batch", None)) == PartitionSpec(("data", "fsdp", "expert"), None)
    assert spec(("layers", "experts", "embed", "mlp")) == PartitionSpec(None, "expert", "fsdp", "tensor")
    assert spec(("layers", "embed", "router")) == PartitionSpec(None, "fsdp", None)
    assert spec(("layers", "embed", "heads", "head_dim")) == PartitionSpec(None, "fsdp", "tensor", None)
    assert spec(("vocab", "embed")) == PartitionSpec("tensor", "fsdp")
    assert spec(("layers", "mlp", "embed")) == PartitionSpec(None, "tensor", "fsdp")
    assert spec(("norm",)) == PartitionSpec(None)


def test_an_axis_without_a_rule_is_refused():
    with pytest.raises(UserError, match=r"\['lanes'\] have no sharding rule.*'batch'"):
        spec(("batch", "lanes"))


def test_a_mesh_axis_used_twice_is_refused_with_both_names():
    with pytest.raises(UserError, match="mesh axis 'tensor' would split both heads and mlp"):
        spec(("heads", "mlp"))
    with pytest.raises(UserError, match="mesh axis 'context' would split both pieces and time"):
        spec(("pieces", "time"))
    with pytest.raises(UserError, match="mesh axis 'fsdp' would split both batch and embed"):
        spec(("batch", "embed"))


def test_a_mesh_has_every_axis_and_fills_in_what_is_left(cpu_devices):
    mesh = make_mesh({"fsdp": -1, "tensor": 2}, cpu_devices)
    assert dict(mesh.shape) == {"data": 1, "fsdp": 4, "expert": 1, "context": 1, "tensor": 2}
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert set(dict(make_mesh({}, cpu_devices[3:4]).shape).values()) == {1}
    assert set(make_mesh({"data": 2}, cpu_devices[6:]).devices.flat) == set(cpu_devices[6:])


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (
            {"experts": 2},
            r"unknown axes \['experts'\]; the known ones are \['data', 'fsdp', 'expert', 'context', 'tensor'\]",
        ),
        ({"data": 0}, "axis data the size 0"),
        ({"data": -2}, "axis data the size -2"),
        ({"data": -1, "fsdp": -1}, "more than one axis of size -1"),
        ({"data": -1, "tensor": 3}, "does not divide 8 devices; the fixed axes take 3"),
        ({"data": 2, "tensor": 2}, "mesh data 2 x tensor 2 has 4 places for 8 devices"),
        ({"data": 16}, "has 16 places for 8 devices"),
    ],
)
def test_a_mesh_that_cannot_be_made_says_why(axes, message, cpu_devices):
    with pytest.raises(UserError, match=message):
        make_mesh(axes, cpu_devices)


def fake_slices(*sizes):
    """TPU devices of an unknown kind, numbered through, in slices of these sizes and two columns, slice 0 last."""
    numbered = [(index, i) for index, size in enumerate(sizes) for i in range(size)]
    what = {"platform": "tpu", "device_kind": "fake", "core_on_chip": 0}
    devices = [
        SimpleNamespace(**what, id=n, coords=(i // 2, i % 2, 0), slice_index=index, process_index=index)
        for n, (index, i) in enumerate(numbered)
    ]
    return sorted(devices, key=lambda device: -device.slice_index)


def test_only_data_crosses_slices():
    sizes = {"data": 4, "fsdp": 2, "expert": 1, "tensor": 2}
    grid = slice_grid(sizes, fake_slices(8, 8))
    assert grid.shape == (4, 2, 1, 2)
    slices = np.vectorize(lambda device: device.slice_index)(grid)
    assert [set(part.flat) for part in slices] == [{0}, {0}, {1}, {1}]  # each index of data in one slice
    assert {device.id for device in grid.flat} == set(range(16))


@pytest.mark.parametrize(
    ("axes", "slices", "message"),
    [
        (
            {"data": 1, "fsdp": -1},
            (4, 4),
            "in 2 slices, and only axis data may cross .* data 1 must be a multiple of 2",
        ),
        ({"data": 3, "fsdp": 2}, (3, 3), "data 3 must be a multiple of 2"),
        ({"data": 2, "fsdp": 3}, (4, 2), r"takes \{0: 4, 1: 2\} devices"),
    ],
)
def test_a_mesh_whose_other_axes_would_cross_slices_is_refused(axes, slices, message):
    with pytest.raises(UserError, match=message):
        make_mesh(axes, fake_slices(*slices))


def test_parameters_are_placed_and_checked(cpu_devices):
    mesh = make_mesh({"fsdp": 4, "tensor": 2}, cpu_devices)
    axes = {"embed": ("vocab", "embed"), "layers": {"k": ("layers", "embed", "kv_heads", "head_dim")}}
    abstract = {
        "embed": jax.ShapeDtypeStruct((6, 8), np.float32),
        "layers": {"k": jax.ShapeDtypeStruct((1, 8, 2, 3), np.float32)},
    }
    placed = param_shardings(mesh, axes, abstract)
    assert placed == {
        "embed": NamedSharding(mesh, PartitionSpec("tensor", "fsdp")),
        "layers": {"k": NamedSharding(mesh, PartitionSpec(None, "fsdp", "tensor", None))},
    }
    abstract["layers"]["k"] = jax.ShapeDtypeStruct((1, 8, 3, 3), np.float32)
    with pytest.raises(UserError, match=r"layers\.k: kv_heads 3 does not divide over tensor 2; use a multiple of 2"):
        param_shardings(mesh, axes, abstract)


def test_the_sampler_takes_the_devices_after_the_trainers():
    assert split_devices(D8, {"fsdp": 4}, {"tensor": 2}) == ([0, 1, 2, 3], [4, 5])
    assert split_devices(D8, {"fsdp": -1}, {"data": 2}) == ([0, 1, 2, 3, 4, 5], [6, 7])
    assert split_devices(D8, {"fsdp": -1, "tensor": 4}, {"data": 2}) == ([0, 1, 2, 3], [4, 5])
    assert split_devices(D8, {"data": 6}, {"data": -1}) == ([0, 1, 2, 3, 4, 5], [6, 7])


def test_a_single_device_is_shared():
    assert split_devices([5], {"data": 1}, {"data": 1}) == ([5], [5])
    assert split_devices([5], {"data": -1}, {"data": 1}) == ([5], [5])


@pytest.mark.parametrize(
    ("count", "trainer", "sampler", "message"),
    [
        (
            1,
            {"data": 2},
            {"data": 1},
            r"train.mesh \(data 2\) needs 2 devices and sampler.mesh \(data 1\) 1, but there are 1",
        ),
        (2, {"data": 2}, {"data": 1}, "but there are 2; make a mesh smaller"),
        (2, {"data": -1, "tensor": 2}, {"data": 1}, "but there are 2"),
        (8, {"data": -1}, {"data": -1}, "only one can take what is left"),
        (8, {"contexts": 2}, {"data": 1}, r"train.mesh has unknown axes \['contexts'\]"),
        (8, {"data": 2}, {"data": 0}, "sampler.mesh gives axis data the size 0"),
    ],
)
def test_a_split_that_cannot_be_made_says_why(count, trainer, sampler, message):
    with pytest.raises(UserError, match=message):
        split_devices(D8[:count], trainer, sampler)


def test_every_rule_names_mesh_axes_that_exist(cpu_devices):
    mesh = make_mesh({"data": -1}, cpu_devices)
    for axis in RULES:
        NamedSharding(mesh, spec((axis,)))


def test_a_sampler_alone_takes_the_first_devices():
    assert own_devices(D8, {"data": 2, "tensor": 2}, "sampler.mesh") == [0, 1, 2, 3]
    assert own_devices(D8, {"data": -1, "tensor": 3}, "sampler.mesh") == [0, 1, 2, 3, 4, 5]
    with pytest.raises(UserError, match=r"sampler.mesh \(data 9\) needs 9 devices, but there are 8"):
        own_devices(D8, {"data": 9}, "sampler.mesh")


def test_pieces_of_rows_stay_where_they_are_and_come_back(cpu_devices):
    # Rows 0..3 over fsdp 2, tokens 0..5 over context 2: [row, token half], one device's rows together.
    mesh = make_mesh({"fsdp": 2, "context": 2, "tensor": 2}, cpu_devices)
    rows = np.arange(24).reshape(4, 6)
    parted = jax.jit(lambda x: pieces(mesh, x))(rows)
    halves = [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
    np.testing.assert_array_equal(parted, [rows[b, 3 * half : 3 * half + 3] for b, half in halves])
    np.testing.assert_array_equal(jax.jit(lambda x: joined(mesh, pieces(mesh, x)))(rows), rows)
    assert pieces(make_mesh({"data": 8}, cpu_devices), rows) is rows
    assert pieces(None, rows) is joined(None, rows) is rows


def test_tokens_that_nobody_can_split_are_refused(cpu_devices):
    check_whole_rows(make_mesh({"data": 8}, cpu_devices), "sampler.mesh")
    with pytest.raises(
        UserError, match=r"sampler\.mesh has context 4, but only the trainer splits the tokens of a row"
    ):
        check_whole_rows(make_mesh({"data": 2, "context": -1}, cpu_devices), "sampler.mesh")
