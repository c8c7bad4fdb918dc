"""TensorBoard event files as tensorboardX and TensorFlow write them, whole, resumed, cut off and damaged."""

import struct

import numpy as np
import pytest
from tensorboardX import SummaryWriter
from tensorboardX.crc32c import crc32c
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.proto.tensor_pb2 import TensorProto
from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto

from jaxrl_llm.scaling.sources import read_curve, read_curves
from jaxrl_llm.scaling.tensorboard import masked_crc, read_events
from jaxrl_llm.types import UserError


def log(folder, points, tag="eval/value", purge_step=None):
    writer = SummaryWriter(str(folder), purge_step=purge_step)
    for step, value in points:
        writer.add_scalar(tag, value, step)
        writer.add_scalar("eval/flops", 10.0 * step, step)
    writer.close()
    return next(iter(sorted(folder.glob("*tfevents*"))))


def masked(data: bytes) -> int:
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def test_checksums_are_the_published_ones_whatever_the_lengths():
    # RFC 3720, B.4: 32 bytes of zeros give 8a9136aa; and the check value of CRC-32C of "123456789" is e3069283.
    for data, crc in ((bytes(32), 0x8A9136AA), (b"123456789", 0xE3069283)):
        assert masked_crc([data]) == [(((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF]
    generator = np.random.default_rng(0)
    records = [generator.bytes(int(n)) for n in (3, 0, 40, 1, 40, 7)]
    assert masked_crc(records) == [masked(record) for record in records]
    assert masked_crc([]) == []


def test_scalars_of_tensorboardx(tmp_path):
    file = log(tmp_path, [(k, 0.1 * k) for k in range(6)])
    for path in (tmp_path, file):
        curve = read_curve(path)
        assert curve.compute.tolist() == [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]
        np.testing.assert_allclose(curve.reward, 0.1 * np.arange(6), rtol=1e-6)
    (by_step,) = read_curves(tmp_path, x="step")
    assert by_step.curve.compute.tolist() == list(range(6))
    assert "count of steps" in by_step.warnings[0]


def test_a_resumed_session_replaces_what_it_does_again(tmp_path):
    log(tmp_path, [(k, 0.1) for k in range(6)])
    first = next(tmp_path.glob("*tfevents*"))
    first.rename(tmp_path / "events.out.tfevents.1.host")
    log(tmp_path, [(k, 0.9) for k in (4, 5)], purge_step=4)
    values = read_events(tmp_path)[0].tags["eval/value"].values
    assert list(values) == [0, 1, 2, 3, 4, 5]
    np.testing.assert_allclose(list(values.values()), [0.1] * 4 + [0.9] * 2, rtol=1e-6)


def test_a_counter_written_at_other_steps_counts_as_last_written(tmp_path):
    writer = SummaryWriter(str(tmp_path))
    for step in (1, 3, 4, 8):
        writer.add_scalar("tokens", 100 * step, step)
    for step in (3, 5, 20):
        writer.add_scalar("acc", 0.01 * step, step)
    writer.close()
    (found,) = read_curves(tmp_path, x="tokens", y="acc")
    assert found.curve.compute.tolist() == [300.0, 400.0]
    assert "from step 20 on is left out" in found.warnings[0]
    with pytest.raises(UserError, match="several tags; choose one with --y: tokens, acc"):
        read_curves(tmp_path)
    with pytest.raises(UserError, match="no tag 'loss', only tokens, acc"):
        read_curves(tmp_path, y="loss")
    with pytest.raises(UserError, match="no tag 'hours' for the compute, only step, tokens, acc"):
        read_curves(tmp_path, x="hours", y="acc")


def test_a_log_folder_has_a_curve_for_each_run(tmp_path):
    for name, scale in (("a", 0.1), ("b", 0.05)):
        log(tmp_path / "logs" / name, [(k, scale * k) for k in range(4)])
    assert [c.name for c in read_curves(tmp_path / "logs")] == ["a", "b"]


def test_a_foreign_log_with_a_config_of_its_own_is_no_run_of_ours(tmp_path):
    log(tmp_path / "run", [(k, 0.1 * k) for k in range(4)])
    (tmp_path / "run" / "config.yaml").write_text("lr: 1\n")
    assert len(read_curve(tmp_path / "run")) == 4
    (tmp_path / "young").mkdir()
    (tmp_path / "young" / "config.yaml").write_text("seed: 0\n")
    with pytest.raises(UserError, match="no evaluations yet"):
        read_curves(tmp_path / "young")


def write_records(path, records):
    with path.open("wb") as file:
        for record in records:
            head = struct.pack("<Q", len(record))
            file.write(head + struct.pack("<I", masked(head)) + record + struct.pack("<I", masked(record)))


def test_scalars_of_tensorflow_2_are_tensors(tmp_path):
    shape = TensorShapeProto()
    tensors = [
        TensorProto(dtype=1, tensor_shape=shape, float_val=[0.25]),
        TensorProto(dtype=1, tensor_shape=shape, tensor_content=struct.pack("<f", 0.5)),
        TensorProto(dtype=2, tensor_shape=shape, double_val=[0.75]),
        TensorProto(dtype=9, tensor_shape=shape, int64_val=[1]),
        TensorProto(dtype=7, tensor_shape=shape, string_val=[b"no number"]),
    ]
    events = [
        Event(step=k, summary=Summary(value=[Summary.Value(tag="acc", tensor=tensor)]))
        for k, tensor in enumerate(tensors)
    ]
    path = tmp_path / "events.out.tfevents.0.host"
    write_records(path, [event.SerializeToString() for event in events])
    assert read_events(path)[0].tags["acc"].values == {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0}


def test_damage_is_named_by_its_byte_and_a_cut_off_end_is_a_warning(tmp_path):
    file = log(tmp_path, [(k, 0.1 * k) for k in range(6)])
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    (found,) = read_curves(file)
    # The last record is the compute of step 5.
    assert found.curve.compute.tolist() == [0.0, 10.0, 20.0, 30.0, 40.0]
    assert "ends within a record" in found.warnings[0]
    assert "1 steps from step 5 on is left out" in found.warnings[1]
    flipped = bytearray(whole)
    flipped[-10] ^= 1
    file.write_bytes(bytes(flipped))
    with pytest.raises(UserError, match=r"byte \d+: the checksum of a record does not hold"):
        read_curves(file)
    file.write_bytes(whole[:8] + b"\x00\x00\x00\x00" + whole[12:])
    with pytest.raises(UserError, match="byte 0: the checksum of a record's length"):
        read_curves(file)
    file.write_bytes(b"compute,reward\n1,.5\n2,.6\n")
    with pytest.raises(UserError, match="byte 0: the checksum of a record's length"):
        read_curves(file)


def test_nan_is_named_by_its_step(tmp_path):
    log(tmp_path, [(0, 0.1), (1, float("nan")), (2, 0.3)])
    with pytest.raises(UserError, match="step 1: eval/value is nan"):
        read_curves(tmp_path)
