"""The trainer's samplers in other processes, from the configuration; none unless it names some or listens for them."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.cli.assemble import Setup
from jaxrl_llm.cli.console import Progress
from jaxrl_llm.cli.join import Outlets, how_to_sample
from jaxrl_llm.cli.worlds import credentials, facts, wire_form
from jaxrl_llm.config import RunConfig, SamplerConfig
from jaxrl_llm.metrics import RunLog
from jaxrl_llm.sampler.serving.access import Access, check_access, read_token
from jaxrl_llm.types import Params, UserError
from jaxrl_llm.weights import WeightBoard
from jaxrl_llm.weights.snapshot import named
from jaxrl_llm.worlds.dialling import host_and_port, own_address
from jaxrl_llm.worlds.discovery import announce, check_place
from jaxrl_llm.worlds.fleet import Fleet, FleetOptions
from jaxrl_llm.worlds.link import LinkOptions

_ONLY_IN_THE_FILE = ("retried", "straggler")  # one for every group; the terminal is for what happens to samplers


def without_deployment(config: RunConfig) -> RunConfig:
    """The configuration without what says where samplers are: a run goes on with others."""
    defaults = SamplerConfig()
    sampler = config.sampler.model_copy(update={"workers": defaults.workers, "remote": defaults.remote})
    return config.model_copy(update={"sampler": sampler})


def is_remote(sampler: SamplerConfig) -> bool:
    """Whether samplers in other processes may take part."""
    return bool(sampler.workers) or sampler.remote.listen is not None


def samples_here(sampler: SamplerConfig) -> bool:
    """Whether the trainer's process samples."""
    return not is_remote(sampler) if sampler.remote.local is None else sampler.remote.local


def check_deployment(sampler: SamplerConfig) -> Access:
    """Who may reach the trainer. Raises UserError for addresses, files or combinations that cannot work."""
    remote = sampler.remote
    for place in sampler.workers:
        check_place(place, "sampler.workers")
    if remote.advertise is not None:
        host_and_port(remote.advertise, "sampler.remote.advertise")
    host, _ = host_and_port(remote.listen or "127.0.0.1:0", "sampler.remote.listen")
    token_file = Path(remote.token_file) if remote.token_file else None
    certificate, key = (Path(path) if path else None for path in (remote.tls_cert, remote.tls_key))
    access = check_access(host, read_token(token_file), certificate, key)
    own_address(access.host, 0, remote.advertise, "sampler.remote.advertise")
    return access


def check_evaluation(config: RunConfig) -> None:
    """Raises UserError unless samplers in other processes get every version that they are to evaluate."""
    rollout, every, steps = config.rollout, config.eval.every, config.train.steps
    if samples_here(config.sampler) or rollout.mode != "ppo_off_policy":
        return
    if every % rollout.max_lag or steps % rollout.max_lag:
        raise UserError(
            f"rollout.mode = ppo_off_policy gives samplers one version in rollout.max_lag = {rollout.max_lag}, and "
            f"they evaluate too: eval.every = {every} and train.steps = {steps} must be multiples of it; or "
            "sampler.remote.local = true evaluates in a trainer of one process"
        )


@contextmanager
def open_outlets(
    setup: Setup,
    sampler: SamplerConfig,
    run_dir: Path,
    log: RunLog,
    progress: Progress,
    *,
    to_host: Callable[[Params], Iterable[tuple[str, np.ndarray]]] = named,
) -> Generator[Outlets]:
    """Where a run's weights go; samplers in other processes, if there may be any, can register from now on."""
    if not is_remote(sampler):
        yield Outlets(WeightBoard())
        return
    remote = sampler.remote
    access = check_deployment(sampler)
    _, port = host_and_port(remote.listen or "127.0.0.1:0", "sampler.remote.listen")
    wire = wire_form(setup.config, remote, setup.trainer_mesh)
    file, authority = (Path(path) if path else None for path in (remote.token_file, remote.tls_authority))

    def note(kind: str, words: str, about: dict[str, Any]) -> None:
        log.event(kind, words, about)
        if kind not in _ONLY_IN_THE_FILE:
            progress.say(words)

    fleet = Fleet(
        f"{run_dir.name} {setup.fingerprints['config'][:8]}",
        facts(setup, wire),
        how_to_sample(setup.config),
        access,
        credentials(file, authority),
        FleetOptions(
            port,
            remote.advertise,
            sampler.workers,
            remote.fan_out,
            None if samples_here(sampler) else remote.patience_s,
            remote.transfer,
            LinkOptions(
                heartbeat_s=remote.heartbeat_s,
                silence_s=remote.silence_s,
                retry_s=remote.retry_s,
                push_timeout_s=remote.push_timeout_s,
                verify_every=remote.verify_every,
            ),
        ),
        note,
        to_host=to_host,
    )
    with fleet:
        progress.say(f"samplers register at {fleet.address}")
        if remote.announce is not None:
            announce(Path(remote.announce), fleet.address)
        try:
            yield Outlets(WeightBoard() if samples_here(sampler) else None, fleet)
        finally:
            if remote.announce is not None:
                Path(remote.announce).unlink(missing_ok=True)
