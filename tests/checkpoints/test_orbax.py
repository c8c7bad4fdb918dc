import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.checkpoints.manifest import describe_files, read_manifest, write_manifest
from jaxrl_llm.checkpoints.orbax import CheckpointStore
from jaxrl_llm.sharding import make_mesh
from jaxrl_llm.types import UserError

FINGERPRINTS = {"config": "c1", "tokenizer": "t1", "dataset": "d1"}
EXTRAS = {"prompts": {"next_index": 7}, "retired": ["a", "b"], "wall_s": 1.5, "note": None}


def make_state(step):
    """A state with the shapes of a real one: nested parameters, a tuple of optimizer states, a scalar, two dtypes."""
    rng = np.random.default_rng(step)
    w = {
        "embed": rng.normal(size=(8, 4)).astype(np.float32),
        "layers": {"q": rng.normal(size=(2, 4, 6)).astype(np.float32)},
    }
    moments = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), w)
    return {"step": jnp.int32(step), "params": jax.tree.map(jnp.asarray, w), "opt_state": ({"mu": moments}, {})}


@pytest.fixture(scope="module")
def placed():
    """An abstract state on one device."""
    sharding = NamedSharding(make_mesh({}, jax.devices()[:1]), PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), make_state(0))


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints", keep=3)


def save(store, step):
    store.save(step, make_state(step), EXTRAS | {"at": step}, FINGERPRINTS)


def assert_bit_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def data_files(tmp_path, step):
    root = tmp_path / "checkpoints" / f"step_{step:08d}"
    return sorted(p for p in root.rglob("*") if p.is_file() and p.parent.name == "d")


def test_state_and_extras_come_back(store, placed):
    assert store.restore_latest(placed, fingerprints=FINGERPRINTS) is None
    save(store, 10)
    save(store, 20)
    step, state, extras = store.restore_latest(placed, fingerprints=FINGERPRINTS)
    assert (step, extras) == (20, EXTRAS | {"at": 20})
    assert_bit_equal(state, make_state(20))


def test_the_newest_are_kept(store, tmp_path):
    for step in (10, 20, 30, 40):
        save(store, step)
    assert store.steps() == [20, 30, 40]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [f"step_{n:08d}" for n in (20, 30, 40)]


def test_a_checkpoint_restores_onto_another_mesh(store, placed, cpu_devices):
    save(store, 10)
    mesh = make_mesh({"fsdp": 4, "tensor": 2}, cpu_devices)
    spread = NamedSharding(mesh, PartitionSpec("fsdp"))
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=spread if x.shape == (8, 4) else NamedSharding(mesh, PartitionSpec())
        ),
        placed,
    )
    state = store.restore_latest(abstract, fingerprints=FINGERPRINTS).state
    assert state["params"]["embed"].sharding == spread
    assert_bit_equal(state, make_state(10))
    # ... and from that mesh back.
    store.save(11, state, {}, FINGERPRINTS)
    assert_bit_equal(store.restore_latest(placed, fingerprints=FINGERPRINTS).state, make_state(10))


def flip_bit(path, position):
    raw = bytearray(path.read_bytes())
    raw[position // 8] ^= 1 << (position % 8)
    path.write_bytes(raw)


def test_single_flipped_bits_fall_back_to_the_step_before(store, placed, tmp_path, caplog):
    save(store, 10)
    save(store, 20)
    rng = np.random.default_rng(0)
    for path in (p for p in (tmp_path / "checkpoints" / "step_00000020").rglob("*") if p.is_file()):
        for position in rng.integers(0, 8 * path.stat().st_size, 2):
            flip_bit(path, int(position))
            step, state, extras = store.restore_latest(placed, fingerprints=FINGERPRINTS)
            assert (step, extras["at"]) == (10, 10), path
            assert_bit_equal(state, make_state(10))
            flip_bit(path, int(position))
    assert "resuming from step 10" in caplog.text
    assert store.restore_latest(placed, fingerprints=FINGERPRINTS).step == 20


def test_sound_files_with_other_numbers_are_not_believed(store, placed, tmp_path, caplog):
    for step in (10, 20):
        save(store, step)
    path = tmp_path / "checkpoints" / "step_00000020"
    shutil.rmtree(path / "arrays")
    shutil.copytree(tmp_path / "checkpoints" / "step_00000010" / "arrays", path / "arrays")
    body = read_manifest(path / "manifest.json") | {"files": describe_files(path / "arrays")}
    (path / "manifest.json").unlink()
    write_manifest(path / "manifest.json", body)
    assert store.restore_latest(placed, fingerprints=FINGERPRINTS).step == 10
    assert "array opt_state.0.mu.embed is not what was saved" in caplog.text


@pytest.mark.parametrize("damage", ["truncated", "empty", "missing", "zeroed"])
def test_damaged_data_fall_back_to_the_step_before(damage, store, placed, tmp_path, caplog):
    save(store, 10)
    save(store, 20)
    for path in data_files(tmp_path, 20):
        raw = path.read_bytes()
        match damage:
            case "truncated":
                path.write_bytes(raw[: len(raw) // 2])
            case "empty":
                path.write_bytes(b"")
            case "missing":
                path.unlink()
            case "zeroed":
                path.write_bytes(bytes(len(raw)))
    with caplog.at_level(logging.WARNING):
        step, state, extras = store.restore_latest(placed, fingerprints=FINGERPRINTS)
    assert (step, extras["at"]) == (10, 10)
    assert_bit_equal(state, make_state(10))
    assert "step_00000020 passed over" in caplog.text


def test_a_changed_manifest_falls_back(store, placed, tmp_path):
    save(store, 10)
    save(store, 20)
    path = tmp_path / "checkpoints" / "step_00000020" / "manifest.json"
    text = path.read_text()
    for changed in (text.replace('"next_index": 7', '"next_index": 8'), text[:-40], "", "[]"):
        assert changed != text
        path.write_text(changed)
        assert store.restore_latest(placed, fingerprints=FINGERPRINTS).step == 10
    path.unlink()
    assert store.restore_latest(placed, fingerprints=FINGERPRINTS).step == 10


def test_nothing_that_verifies_is_an_error_not_a_fresh_start(store, placed, tmp_path):
    save(store, 10)
    (tmp_path / "checkpoints" / "step_00000010" / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"no checkpoint in .* verifies \(step_00000010: manifest.json cannot be read"):
        store.restore_latest(placed, fingerprints=FINGERPRINTS)


def test_a_run_goes_on_from_the_step_it_fell_back_to(store, placed, tmp_path):
    for step in (10, 20, 30):
        save(store, step)
    for step in (20, 30):
        (tmp_path / "checkpoints" / f"step_{step:08d}" / "manifest.json").write_text("{")
    assert store.restore_latest(placed, fingerprints=FINGERPRINTS).step == 10
    # Step 20 comes again: it replaces the damaged one, and the damaged future after it goes.
    save(store, 20)
    assert store.steps() == [10, 20]
    assert store.restore_latest(placed, fingerprints=FINGERPRINTS).step == 20
    save(store, 30)
    assert store.steps() == [10, 20, 30]


def test_keeping_one_never_prefers_a_damaged_future(tmp_path, placed):
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 10)
    save(store, 30)
    (tmp_path / "step_00000030" / "manifest.json").write_text("{")
    one = CheckpointStore(tmp_path, keep=1)
    save(one, 20)
    assert one.steps() == [20]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_never_saved(bad, store, placed):
    save(store, 10)
    state = make_state(20)
    state["opt_state"][0]["mu"]["layers"]["q"] = state["opt_state"][0]["mu"]["layers"]["q"].at[1, 2, 3].set(bad)
    with pytest.raises(UserError, match=r"step 20 was not saved: 1 numbers of opt_state.0.mu.layers.q are not finite"):
        store.save(20, state, {}, FINGERPRINTS)
    assert store.steps() == [10]


@pytest.mark.parametrize("name", ["config", "tokenizer", "dataset"])
def test_another_fingerprint_is_refused_with_both_values(name, store, placed):
    save(store, 10)
    with pytest.raises(UserError, match=rf"belongs to another {name}: it was saved with '\w1', this run has 'other'"):
        store.restore_latest(placed, fingerprints=FINGERPRINTS | {name: "other"})
    with pytest.raises(UserError, match=f"another {name}.*this run has None"):
        store.restore_latest(placed, fingerprints={k: v for k, v in FINGERPRINTS.items() if k != name})


def test_a_state_of_another_shape_is_refused_by_name(store, placed):
    save(store, 10)

    def with_embed(**change):
        old = placed["params"]["embed"]
        leaf = jax.ShapeDtypeStruct(**{"shape": old.shape, "dtype": old.dtype, "sharding": old.sharding} | change)
        return placed | {"params": placed["params"] | {"embed": leaf}}

    for state, message in [
        (with_embed(shape=(9, 4)), r"params.embed is float32 \(8, 4\), this run wants float32 \(9, 4\)"),
        (with_embed(dtype=jnp.bfloat16), r"params.embed is float32 \(8, 4\), this run wants bfloat16"),
        ({k: v for k, v in placed.items() if k != "step"}, "has an array step that"),
        (placed | {"ema": placed["step"]}, "has no array ema"),
    ]:
        with pytest.raises(UserError, match=message):
            store.restore_latest(state, fingerprints=FINGERPRINTS)


@pytest.mark.parametrize("extras", [{"a": (1, 2)}, {"a": float("nan")}, {1: "a"}, {"a": {1}}])
def test_extras_that_json_would_change_are_refused(extras, store):
    with pytest.raises((ValueError, TypeError)):
        store.save(10, make_state(10), extras, FINGERPRINTS)
    assert store.steps() == []


def test_a_full_disk_leaves_the_earlier_steps_and_no_litter(store, placed, tmp_path, monkeypatch):
    save(store, 10)

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"step 20 could not be written to .*No space left"):
            save(store, 20)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00000010"]
    save(store, 20)
    assert store.restore_latest(placed, fingerprints=FINGERPRINTS).step == 20


def test_parameters_are_read_alone(store, tmp_path):
    save(store, 10)
    save(store, 20)
    params = store.read_params(10)
    assert_bit_equal(params, jax.tree.map(np.asarray, make_state(10)["params"]))
    with pytest.raises(UserError, match=r"no checkpoint of step 15; it has \[10, 20\]"):
        store.read_params(15)
    for path in data_files(tmp_path, 20):
        path.unlink()
    with pytest.raises(UserError, match="is damaged"):
        store.read_params(20)


def test_keeping_none_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"checkpoint\.keep is 0"):
        CheckpointStore(tmp_path, keep=0)


KILLED_SAVER = """
import os, signal, sys, threading, time
sys.path[:0] = {paths!r}
import jax
jax.config.update("jax_platforms", "cpu")
import test_orbax

# Imports are paid once, before the forks. Each child restores, says what it found, and saves until it is killed.
for when in {plan!r}:
    child = os.fork()
    if child == 0:
        test_orbax.save_until_killed({directory!r}, {journal!r}, when)
    _, status = os.waitpid(child, 0)
    print(when, os.waitstatus_to_exitcode(status), flush=True)
"""


def save_until_killed(directory, journal, when):
    """Runs in a child. `when` is (a function of os, the number of the call that kills) or a time in seconds."""
    store = CheckpointStore(directory, keep=2)
    sharding = NamedSharding(make_mesh({}, jax.devices()[:1]), PartitionSpec())
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), make_state(0))
    restored = store.restore_latest(abstract, fingerprints=FINGERPRINTS)
    step = restored.step if restored else 0
    if restored:
        assert_bit_equal(restored.state, make_state(step))
    for listed in store.steps():  # none of them half deleted
        assert_bit_equal(store.read_params(listed), jax.tree.map(np.asarray, make_state(listed)["params"]))

    def note(line):
        with open(journal, "a") as file:
            file.write(line + "\n")

    note(f"restored {step}")
    if isinstance(when, float):
        threading.Timer(when, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    else:
        name, deadly_call = when
        original, calls = getattr(os, name), []

        def deadly(*args, **kwargs):
            calls.append(name)
            if len(calls) == deadly_call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(os, name, deadly)
    while True:
        step += 1
        save(store, step)
        note(f"saved {step}")


def test_kill_9_at_any_moment_loses_no_finished_save(tmp_path):
    plan = [("mkdir", 1), ("fsync", 3), ("rename", 1), 0.2, ("rename", 2), ("rename", 6), ("rename", 7), ("unlink", 5)]
    plan += [("rmdir", 1), ("unlink", 20), 0.13, 0.3]
    directory, journal = tmp_path / "checkpoints", tmp_path / "journal"
    here = Path(__file__).parent
    script = KILLED_SAVER.format(
        paths=[str(here), str(here.parents[1])], plan=plan, directory=str(directory), journal=str(journal)
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [f"{when} -9" for when in plan], run.stdout + run.stderr

    last_saved, restores = 0, []
    for line in journal.read_text().splitlines():
        event, step = line.split()
        if event == "saved":
            last_saved = int(step)
        else:
            # One more than noted: killed between the rename that completes a save and the note.
            assert int(step) in (last_saved, last_saved + 1), journal.read_text()
            restores.append(int(step))
            last_saved = int(step)  # finished, noted or not
    assert len(restores) == len(plan)
    assert restores[-1] > 5
    store = CheckpointStore(directory, keep=2)
    save(store, store.steps()[-1] + 1)
    assert all(p.name.startswith("step_") for p in directory.iterdir())
    assert len(store.steps()) == 2
