"""Training state through Orbax, with what Orbax leaves out: checksums, fingerprints, a finiteness gate, falling back.

On disk, under the store's directory:

    step_00000040/            one checkpoint: complete, or not there at all
        manifest.json         checksums of every array and file, fingerprints, the caller's extras (see manifest.py)
        arrays/               Orbax
    step_00000040.1/          the same step saved again after a restore from an earlier one; it supersedes the first
    .saving-* .deleting-*     work in progress or left by a killed process: never read, removed by the next save

A checkpoint is born by one rename, after its files are on the disk, and leaves by one rename before they are deleted,
so a process may die at any moment. One run writes at a time; others may read. Where a run has several processes, all
of them save and restore together, each its own part of the arrays, in a directory that all see; the first one does the
rest.
"""

import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxrl_llm.checkpoints.manifest import (
    FORMAT,
    CorruptCheckpoint,
    check_arrays,
    check_files,
    check_json,
    describe_arrays,
    describe_files,
    named_leaves,
    read_manifest,
    write_manifest,
)
from jaxrl_llm.types import Params, UserError
from jaxrl_llm.world import World

_NAME = re.compile(r"step_(\d{8,})(?:\.(\d+))?")
_MANIFEST = "manifest.json"
_ARRAYS = "arrays"


class Restored(NamedTuple):
    step: int
    state: Any
    extras: dict[str, Any]


class _Entry(NamedTuple):
    """A checkpoint directory; sorts by step, then by attempt."""

    step: int
    attempt: int
    path: Path


class CheckpointStore:
    """The checkpoints of one run in one directory, the newest `keep` of them kept.

    The state is any pytree of arrays whose paths are strings (a TrainState is one); `extras` is JSON saved in the same
    atomic unit; `fingerprints` name what the state belongs to (config, tokenizer, dataset) by any strings. `world` are
    the processes whose arrays these are.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int, world: World | None = None):
        if keep < 1:
            raise UserError(f"checkpoint.keep is {keep}; at least the newest checkpoint must be kept")
        self._directory = Path(directory).absolute()
        self._keep = keep
        self._world = world or World()
        self._log = logging.getLogger(__name__)

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, in order; not verified."""
        return sorted({entry.step for entry in self._entries()})

    def save(self, step: int, state: Any, extras: Mapping[str, Any], fingerprints: Mapping[str, str]) -> None:
        """Saves and returns when everything is on the disk; then deletes what is older than the newest `keep`.

        Checkpoints of later steps are deleted too: they belong to a future given up by restoring an earlier step.
        Raises UserError, with every earlier checkpoint intact, if an array holds a number that is not finite or if the
        files cannot be written. Raises ValueError or TypeError if JSON would change the extras.
        """
        check_json(extras)
        _check_finite(step, state)
        unfinished = self._directory / f".saving-{step:08d}"
        together, first = self._world.together, self._world.first
        try:
            with together("the checkpoint's folder", OSError):
                if first:
                    self._directory.mkdir(parents=True, exist_ok=True)
                    self._remove_leftovers()
                    unfinished.mkdir()
            with together("the checkpoint's arrays", OSError, ValueError), _checkpointer() as orbax:
                orbax.save(unfinished / _ARRAYS, args=ocp.args.PyTreeSave(_nested(state)))
            arrays = describe_arrays(state)
            with together("the checkpoint's manifest", OSError, ValueError):
                if first:
                    body = {
                        "format": FORMAT,
                        "step": step,
                        "fingerprints": dict(fingerprints),
                        "extras": dict(extras),
                        "arrays": arrays,
                        "files": describe_files(unfinished / _ARRAYS),
                    }
                    write_manifest(unfinished / _MANIFEST, body)
                    self._complete(step, unfinished)
        except (OSError, ValueError) as error:  # Orbax reports a full disk as ValueError
            if first:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise UserError(
                f"the checkpoint of step {step} could not be written to {self._directory}: {error}; "
                f"free some space or check the directory. Earlier checkpoints are intact"
            ) from error
        if first:
            self._prune(step)

    def _complete(self, step: int, unfinished: Path) -> None:
        """The rename by which a checkpoint is born."""
        _sync_tree(unfinished)
        earlier = [entry for entry in self._entries() if entry.step == step]
        suffix = f".{earlier[-1].attempt + 1}" if earlier else ""
        unfinished.rename(self._directory / f"step_{step:08d}{suffix}")
        _sync(self._directory)

    def restore_latest(self, abstract_state: Any, *, fingerprints: Mapping[str, str]) -> Restored | None:
        """The newest checkpoint whose every byte verifies, placed as `abstract_state` says; None if there is none.

        `abstract_state` is a tree of `jax.ShapeDtypeStruct` with shardings, on any mesh. A checkpoint that does not
        verify is passed over with a warning in the log.
        Raises UserError if a fingerprint, or an array's name, shape or dtype, is not that of the checkpoint, and if
        there are checkpoints but none verifies: starting afresh would then be somebody's decision.
        """
        reasons = []
        for entry in reversed(self._entries()):
            try:
                with self._world.together("a checkpoint's manifest", CorruptCheckpoint):
                    body = read_manifest(entry.path / _MANIFEST)
                    _check_fingerprints(entry.path, body["fingerprints"], fingerprints)
                    _check_arrays_wanted(entry.path, body["arrays"], abstract_state)
                state = self._read(entry.path, body, abstract_state)
            except CorruptCheckpoint as error:
                reasons.append(f"{entry.path.name}: {error}")
                self._log.warning("checkpoint %s passed over: %s", entry.path, error)
                continue
            if reasons:
                self._log.warning("resuming from step %d, the newest checkpoint that verifies", entry.step)
            return Restored(entry.step, state, body["extras"])
        if reasons:
            raise UserError(
                f"no checkpoint in {self._directory} verifies ({'; '.join(reasons)}); "
                f"restore the files from a copy, or delete the directory to start again"
            )
        return None

    def read_params(self, step: int, *, ema: bool = False) -> Params:
        """The parameters of one step, or their average, as host arrays, verified.

        Raises UserError if there is none or it is corrupt.
        """
        tree = "ema" if ema else "params"
        path = self._newest_attempt(step)
        try:
            body = read_manifest(path / _MANIFEST)
            wanted: dict[str, Any] = {}
            for name, described in body["arrays"].items():
                if name.startswith(f"{tree}."):
                    leaf = jax.ShapeDtypeStruct(tuple(described["shape"]), jnp.dtype(described["dtype"]))
                    _put(wanted, name.split("."), leaf)
            if not wanted:
                raise UserError(f"checkpoint {path} has no average of the weights: train.ema was null; leave --ema out")
            return self._read(path, body, wanted)[tree]
        except CorruptCheckpoint as error:
            raise UserError(
                f"checkpoint {path} is damaged: {error}; use another step, there are {self.steps()}"
            ) from error

    def fingerprints(self, step: int) -> dict[str, str]:
        """What the checkpoint of one step was saved with. Raises UserError if there is none or it is corrupt."""
        path = self._newest_attempt(step)
        try:
            return dict(read_manifest(path / _MANIFEST)["fingerprints"])
        except CorruptCheckpoint as error:
            raise UserError(f"checkpoint {path} is damaged: {error}") from error

    def _newest_attempt(self, step: int) -> Path:
        entries = [entry for entry in self._entries() if entry.step == step]
        if not entries:
            raise UserError(f"{self._directory} has no checkpoint of step {step}; it has {self.steps()}")
        return entries[-1].path

    def _entries(self) -> list[_Entry]:
        if not self._directory.is_dir():
            return []
        found = []
        for path in self._directory.iterdir():
            if match := _NAME.fullmatch(path.name):
                found.append(_Entry(int(match[1]), int(match[2] or 0), path))
        return sorted(found)

    def _read(self, path: Path, body: Mapping[str, Any], abstract: Any) -> Any:
        """The arrays named by `abstract`, verified: where its shardings say, or on the host if it has none.

        Files are verified before Orbax sees them (it may return wrong numbers for a flipped bit), arrays after.
        """
        together = self._world.together
        with together("a checkpoint's files", CorruptCheckpoint):
            if self._world.first:
                check_files(body["files"], path / _ARRAYS)
        nested = _nested(abstract)
        how = jax.tree.map(
            lambda x: (
                ocp.RestoreArgs(restore_type=np.ndarray)
                if x.sharding is None
                else ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape, dtype=x.dtype)
            ),
            nested,
        )
        args = ocp.args.PyTreeRestore(item=nested, restore_args=how, partial_restore=True)
        with together("a checkpoint's arrays", CorruptCheckpoint):
            try:
                with _checkpointer() as orbax:
                    restored = orbax.restore(path / _ARRAYS, args=args)
            except Exception as error:  # whatever Orbax and TensorStore raise on damaged files: reported by the caller
                raise CorruptCheckpoint(f"its arrays cannot be read ({type(error).__name__}: {error})") from error
        leaves = [_get(restored, name.split(".")) for name, _ in named_leaves(abstract)]
        state = jax.tree.unflatten(jax.tree.structure(abstract), leaves)
        with together("a checkpoint's checksums", CorruptCheckpoint):
            check_arrays(body["arrays"], state)
        return state

    def _prune(self, saved_step: int) -> None:
        entries = self._entries()
        newest = {entry.step: entry for entry in entries if entry.step <= saved_step}
        kept = {newest[step] for step in sorted(newest)[-self._keep :]}
        for entry in entries:
            if entry not in kept:
                doomed = self._directory / f".deleting-{entry.path.name}"
                entry.path.rename(doomed)
                shutil.rmtree(doomed)

    def _remove_leftovers(self) -> None:
        for path in self._directory.iterdir():
            if path.name.startswith((".saving-", ".deleting-")):
                shutil.rmtree(path)


def _checkpointer() -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())


def _put(tree: dict[str, Any], path: list[str], leaf: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = leaf


def _get(tree: Any, path: list[str]) -> Any:
    for part in path:
        tree = tree[part]
    return tree


def _nested(tree: Any) -> dict[str, Any]:
    """The tree as plain nested dicts, so that what is on disk does not depend on the classes that held it."""
    nested: dict[str, Any] = {}
    for name, leaf in named_leaves(tree):
        _put(nested, name.split("."), leaf)
    return nested


@jax.jit
def _not_finite(leaves: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: jnp.sum(~jnp.isfinite(leaf)) for name, leaf in leaves.items()}


def _check_finite(step: int, state: Any) -> None:
    numbers = {name: leaf for name, leaf in named_leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)}
    for name, bad in jax.device_get(_not_finite(numbers)).items():
        if bad:
            raise UserError(
                f"step {step} was not saved: {bad} numbers of {name} are not finite. "
                f"Resume from the last checkpoint with a smaller optimizer.lr or with optimizer.clip_norm set"
            )


def _check_fingerprints(path: Path, saved: Mapping[str, str], now: Mapping[str, str]) -> None:
    for name in sorted({*saved, *now}):
        if saved.get(name) != now.get(name):
            raise UserError(
                f"checkpoint {path} belongs to another {name}: it was saved with {saved.get(name)!r}, this run has "
                f"{now.get(name)!r}; choose another run directory, or go back to the {name} it was made with"
            )


def _check_arrays_wanted(path: Path, saved: Mapping[str, Mapping[str, Any]], abstract_state: Any) -> None:
    wanted = dict(named_leaves(abstract_state))
    if missing := sorted(wanted.keys() - saved.keys()):
        raise UserError(f"checkpoint {path} has no array {missing[0]}; it was saved by another model or optimizer")
    if extra := sorted(saved.keys() - wanted.keys()):
        raise UserError(f"checkpoint {path} has an array {extra[0]} that this model and optimizer do not have")
    for name, leaf in wanted.items():
        there, here = (tuple(saved[name]["shape"]), saved[name]["dtype"]), (tuple(leaf.shape), str(leaf.dtype))
        if there != here:
            raise UserError(
                f"checkpoint {path}: array {name} is {there[1]} {there[0]}, this run wants {here[1]} {here[0]}"
            )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(root: Path) -> None:
    for folder, _, files in os.walk(root):
        for name in files:
            _sync(Path(folder) / name)
        _sync(Path(folder))
