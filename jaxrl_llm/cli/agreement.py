"""What the processes of one run must have in common."""

import hashlib
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

import jaxrl_llm
from jaxrl_llm.checkpoints.gguf import resolve_init
from jaxrl_llm.cli.assemble import Setup
from jaxrl_llm.cli.rendezvous import differing
from jaxrl_llm.config import RunConfig
from jaxrl_llm.types import UserError
from jaxrl_llm.world import World

PACKAGES = (
    "jaxrl_llm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "google-jetstream",
    "sentencepiece", "tokenizers", "gguf", "numpy", "scipy",
)  # fmt: skip


def package_versions() -> dict[str, str | None]:
    """The versions of what a run's numbers depend on; None for what is not installed."""

    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {package: version(package) for package in PACKAGES}


def config_facts(config: RunConfig) -> dict[str, str]:
    """Every key of the configuration, the versions of packages and Python, and a digest of this package's code."""
    facts = dict(_flat("", config.model_dump(mode="json")))
    facts |= {f"package {name}": str(version) for name, version in package_versions().items()}
    return facts | {"Python": platform.python_version(), "the code of jaxrl_llm": _code_digest()}


def _flat(prefix: str, value: Any):
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else key, inner)
    else:
        yield prefix, json.dumps(value)


def _code_digest() -> str:
    root, digest = Path(jaxrl_llm.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)} ".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def check_setups(world: World, setup: Setup) -> None:
    """Raises UserError in every process, naming what differs, unless all read the same tokenizer, data and weights."""
    if world.count == 1:
        return
    facts = {name: print_[:12] for name, print_ in setup.fingerprints.items()} | {
        f"the files of {name}": init_files(name)
        for name in (setup.config.model.init, setup.config.lora.init)
        if name is not None
    }
    told = [json.loads(text) for text in world.gather("comparing what the processes read", json.dumps(facts))]
    for index, theirs in enumerate(told):
        if words := differing(index, theirs, told[0]):
            raise UserError(words)


def init_files(init: str) -> str:
    """Names and sizes of what weights are read from: their bytes are too many to compare."""
    path = resolve_init(init)
    found = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.suffix in (".json", ".safetensors"))
    return hashlib.sha256(json.dumps([(p.name, p.stat().st_size) for p in found]).encode()).hexdigest()[:12]
