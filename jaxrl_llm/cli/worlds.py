"""What a trainer and its samplers in other processes agree on, from one side's configuration."""

from pathlib import Path

from jax.sharding import Mesh

from jaxrl_llm.checkpoints.hf_config import SHAPE_KEYS
from jaxrl_llm.cli.agreement import init_files
from jaxrl_llm.cli.assemble import SamplerSetup
from jaxrl_llm.config import RemoteConfig, RunConfig
from jaxrl_llm.sampler.serving.access import read_secret
from jaxrl_llm.sampler.wire_form import WireForm
from jaxrl_llm.worlds.agreement import Facts
from jaxrl_llm.worlds.dialling import Credentials


def wire_form(config: RunConfig, remote: RemoteConfig, mesh: Mesh) -> WireForm:
    """The form in which this run's weights travel, on the mesh of one of the two sides."""
    how = config.sampler
    return WireForm(config.model, mesh, dtype=remote.push_dtype or how.dtype, int8=how.int8_weights)


def facts(setup: SamplerSetup, wire: WireForm) -> Facts:
    """What must be the same on both sides, by name: whatever decides which tokens a request gives, except the weights
    themselves, which the trainer sends."""
    config = setup.config
    model, rollout = config.model, config.rollout
    told = {f"model.{key}": f"{getattr(model, key)}" for key in (*SHAPE_KEYS, "compute_dtype", "head_dtype")}
    told |= {
        "tokenizer": setup.tokenizer.fingerprint[:12],
        "weights on their way": wire.words,
        "sampler.dtype": config.sampler.dtype,
        "sampler.int8_weights": f"{config.sampler.int8_weights}",
        "rollout.max_prompt_tokens": f"{rollout.max_prompt_tokens}",
        "rollout.max_new_tokens": f"{rollout.max_new_tokens}",
        "rollout.interruption": f"{rollout.interruption}" if rollout.interruption.enabled else "off",
        "rollout.tools": "on" if rollout.tools.use else "off",
    }
    if model.init is not None:
        told["checkpoint (the files of model.init)"] = init_files(model.init)
    return told


def credentials(token_file: Path | None, authority: Path | None) -> Credentials:
    """For calling the other side. Raises UserError if a file cannot be read."""
    return Credentials(read_secret(token_file), authority)
