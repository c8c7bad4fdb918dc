"""`jaxrl sampler`: a sampler in a process of its own, for the run of a trainer elsewhere."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from jaxrl_llm.cli.assemble import assemble_sampler
from jaxrl_llm.cli.console import ablations
from jaxrl_llm.cli.devices import configure_jax
from jaxrl_llm.cli.serving import stop_signals
from jaxrl_llm.cli.worlds import facts, wire_form
from jaxrl_llm.config import RunConfig
from jaxrl_llm.sampler.scheduler import Scheduler
from jaxrl_llm.sampler.serving.access import Access
from jaxrl_llm.types import Params, RunFailedError
from jaxrl_llm.weights.transfer import Borrower, Lender
from jaxrl_llm.worlds.dialling import Credentials, own_address, own_host
from jaxrl_llm.worlds.fetching import Fetcher
from jaxrl_llm.worlds.sampler_server import SamplerServer
from jaxrl_llm.worlds.sampler_world import SamplerWorld
from jaxrl_llm.worlds.shelf import Shelf

_LOOK_S = 0.2


@dataclass(frozen=True)
class WorldOptions:
    """`trainer` is where to register (None: wait to be dialled); `advertise` is where others reach this sampler (None:
    where it listens). Without a trainer for `patience_s` seconds a sampler that registers gives up."""

    trainer: str | None
    port: int
    advertise: str | None
    patience_s: float


def run_sampler(
    config: RunConfig, access: Access, credentials: Credentials, options: WorldOptions, say: Callable[[str], None]
) -> None:
    """Sample for a trainer until its run has finished, or SIGINT or SIGTERM.

    Raises UserError if the trainer refuses this sampler, and RunFailedError if the sampler fails or has no trainer.
    """
    configure_jax(config.device)
    setup = assemble_sampler(config)
    how, engine, shelf = setup.config.sampler, setup.engine, Shelf()
    wire = wire_form(setup.config, how.remote, engine.mesh)
    common = facts(setup, wire)

    borrower = lender = None
    if how.remote.transfer:
        host = own_host(access.host, options.advertise)
        borrower, lender = Borrower(host, list(engine.mesh.devices.flat)), Lender(host)
    fetch = Fetcher(credentials, wire.shapes, borrower)

    def make_scheduler(loaded: Params, version: int) -> Scheduler:
        return Scheduler(
            engine,
            loaded,
            version=version,
            decode=setup.tokenizer.decode,
            refill=how.refill_slots,
            recompute_kv=how.recompute_kv,
            loaded=True,
        )

    world = SamplerWorld(engine, wire, common, fetch=fetch, make_scheduler=make_scheduler, shelf=shelf, say=say)
    server = SamplerServer(world, shelf, access, port=options.port, max_calls=4 * how.slots + 64, lender=lender)
    with stop_signals() as stop, server:
        for words in (f"sampler on {access.host}:{server.port} ({how.slots} slots)", *ablations(setup.config.model)):
            say(words)
        if options.trainer is not None:
            address = own_address(access.host, server.port, options.advertise, "--advertise")
            server.register(options.trainer, address, common, credentials, patience_s=options.patience_s, say=say)
        while not stop.wait(_LOOK_S):
            if server.over.done():
                server.over.result()
                break
            if server.failure:
                raise RunFailedError(server.failure)
        else:
            say("stopping")
    if borrower is not None and borrower.hangs:
        sys.stdout.flush()
        os._exit(0)  # JAX's transfer would abort the process if Python ended its thread
