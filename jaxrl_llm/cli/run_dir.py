"""Opening a run directory: its lock, its configuration, the record of what it runs on."""

import platform
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import yaml

from jaxrl_llm.checkpoints.hub import hub_snapshot, is_hub
from jaxrl_llm.cli.agreement import package_versions
from jaxrl_llm.cli.assemble import Setup
from jaxrl_llm.config import differences, dump, validate
from jaxrl_llm.metrics import lock_run, write_json
from jaxrl_llm.models.row_attention import choose_attention
from jaxrl_llm.sampler.jetstream import ENGINE_BASE
from jaxrl_llm.types import UserError

_SHARED_FILE_S = 10.0


def claim(run_dir: Path, setup: Setup) -> None:
    """Write the resolved configuration and the environment, or check that the directory belongs to this run.

    Raises UserError naming the keys in which another run's configuration differs.
    """
    path = run_dir / "config.yaml"
    if path.exists():
        try:
            tree = yaml.safe_load(path.read_text())
        except (OSError, yaml.YAMLError) as error:
            raise UserError(f"{path} cannot be read ({error}); restore it, or use another --run-dir") from None
        if changed := differences(validate(tree or {}, str(path)), setup.config):
            shown = ", ".join(changed[:4]) + (f" and {len(changed) - 4} more" if len(changed) > 4 else "")
            raise UserError(f"run directory {run_dir} belongs to another config ({shown}); use another --run-dir")
    else:
        temporary = path.with_name("config.yaml.tmp")
        temporary.write_text(dump(setup.config))
        temporary.replace(path)
    write_json(run_dir / "environment.json", _environment(setup))


@contextmanager
def opened(run_dir: Path, setup: Setup) -> Iterator[None]:
    """The run directory locked and claimed, by the first process for all of them.

    Raises UserError in all if it is in use or another run's, and in those that do not see it.
    """
    with ExitStack() as stack:
        with setup.world.together("opening the run directory"):
            if setup.world.first:
                stack.enter_context(lock_run(run_dir))
                claim(run_dir, setup)
        with setup.world.together("looking for the run directory"):
            if not setup.world.first and not _appears(run_dir / "environment.json"):
                raise UserError(
                    f"run directory {run_dir}, made by process 0, is not there in process {setup.world.index}; put it "
                    "on a file system that all processes share"
                )
        yield


def _appears(path: Path) -> bool:
    """Network file systems may show a new file only after a while."""
    deadline = time.monotonic() + _SHARED_FILE_S
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _hub_commits(setup: Setup) -> dict[str, str]:
    """The commits that the configuration's `hub:` names stand for in the cache, by name."""
    config = setup.config
    whole = (config.model.init, config.tokenizer.path, config.rollout.reward_model.path)
    names = {name for name in (*whole, config.lora.init) if name is not None and is_hub(name)}
    return {
        name: hub_snapshot(name, weights=False, adapter=name not in whole, offline=True).name for name in sorted(names)
    }


def _environment(setup: Setup) -> dict[str, Any]:
    config = setup.config
    attention = choose_attention(config.model, setup.trainer_mesh, share_prompts=config.train.share_prompts)
    return {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "packages": package_versions(),
        "engine_base": ENGINE_BASE,
        "backend": jax.default_backend(),
        "processes": setup.world.count,
        "devices": [f"{d.device_kind} {d.id}" for d in jax.devices()],
        "trainer_devices": [d.id for d in setup.trainer_mesh.devices.flat],
        "sampler_devices": [d.id for d in setup.engine.mesh.devices.flat] if setup.samples else [],
        "head_dtype": config.model.head_dtype,
        "attention": f"{attention.implementation} ({attention.reason})",
        "seed": setup.config.seed,
        "hub_commits": _hub_commits(setup),
    }
