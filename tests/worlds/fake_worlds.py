"""A trainer and its samplers in one process, without a model: real gRPC, real coordinator, scripted schedulers.

A proxy stands between the two sides and spoils what goes through it.
"""

import asyncio
import contextlib
import threading
import time
from collections import Counter
from types import SimpleNamespace

import grpc
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.data.curriculum import PassRates
from jaxrl_llm.data.prompts import PromptStream
from jaxrl_llm.rollout.coordinator import Coordinator
from jaxrl_llm.rollout.issue import GroupIssuer
from jaxrl_llm.rollout.lag import LagRule
from jaxrl_llm.rollout.requests import HowToSample
from jaxrl_llm.rollout.worker import RolloutWorker
from jaxrl_llm.sampler.serving.access import Token, check_access
from jaxrl_llm.types import Completion, Episode, PolicyWeights, PromptTask, Reward, Sampling
from jaxrl_llm.weights.snapshot import named
from jaxrl_llm.worlds.dialling import Credentials
from jaxrl_llm.worlds.fetching import Fetcher
from jaxrl_llm.worlds.fleet import Fleet, FleetOptions
from jaxrl_llm.worlds.link import LinkOptions
from jaxrl_llm.worlds.sampler_server import SamplerServer
from jaxrl_llm.worlds.sampler_world import SamplerWorld
from jaxrl_llm.worlds.shelf import Shelf

P, G, LEAF = 2, 3, (300, 1000)  # a leaf of more than one chunk
ANSWER = 77  # of every tool
FACTS = {"model": "tiny", "tokenizer": "abc"}
OPEN = check_access("127.0.0.1", None, None, None)


def weights(version):
    return {"w": jnp.full(LEAF, version, jnp.float32), "b": jnp.arange(3, dtype=jnp.float32) + version}


class FakeWire:
    words = "float32"
    shapes = {"w": (LEAF, "float32"), "b": ((3,), "float32")}  # noqa: RUF012

    def rebuild(self, leaves):
        return dict(leaves)

    flipped = False  # a bit of what is read back

    def read_back(self, loaded):
        return named(loaded | {"b": loaded["b"] + 1} if self.flipped else loaded)


class FakeScheduler:
    """Everything asked for finishes in the next step; every token carries the version of the weights in use."""

    def __init__(self, engine, params, version):
        self.engine, self.params, self.version = engine, params, version
        self.paused, self.statistics, self.queue, self.count = False, SimpleNamespace(), [], 0
        self.statistics.__dataclass_fields__ = {}

    def warm_up(self):
        pass

    @property
    def in_flight(self):
        return len(self.queue)

    @property
    def idle(self):
        return not self.queue

    def submit(self, requests):
        for request in requests:
            if request.first:  # behind the prompt stands the first turn with its answer, which takes their numbers
                assert request.tokens_T.tolist()[1:] == [request.stream, request.sibling, ANSWER]
                assert request.first == 3
        ids = list(range(self.count, self.count + len(requests)))
        self.count += len(requests)
        self.queue += zip(ids, requests, strict=True)
        return ids

    def step(self, between):
        between()
        time.sleep(self.engine.step_s)
        # The weights themselves say which version they are.
        assert self.params["w"][0, 0] == self.params["w"][-1, -1] == self.version
        done, self.queue = self.queue, []
        # With tools the first of two turns ends with a call.
        calls = [bool(request.sampling.stop_strings) and request.first == 0 for _, request in done]
        ends = ["stop_string" if call else "stop" for call in calls]
        return [(id, self._completion(request, end)) for (id, request), end in zip(done, ends, strict=True)]

    def _completion(self, request, finish):
        tokens = np.array([request.stream, request.sibling], np.int32)
        logprobs, versions = np.full(2, -0.5, np.float32), np.full(2, self.version, np.int32)
        return Completion(tokens, logprobs, versions, np.zeros(2, bool), finish)

    def abort(self, ids):
        pass

    def so_far(self, id, since=0):
        return None

    def swap(self, loaded, version):
        assert version > self.version
        self.params, self.version = loaded, version


class FakeSampler:
    """A sampler world on a free port; `pulled` are the places it fetched weights from."""

    def __init__(
        self, *, facts=FACTS, step_s=0.0, load_s=0.0, credentials=None, access=OPEN, port=0, borrower=None, lender=None
    ):
        self.pulled, self.said, self.credentials, self.facts = [], [], credentials or Credentials(), facts
        shelf, wire = Shelf(), FakeWire()
        self.wire = wire
        engine = SimpleNamespace(slots=6, step_s=step_s, load_params=lambda tree: (time.sleep(load_s), tree)[1])

        fetcher = Fetcher(self.credentials, wire.shapes, borrower)

        async def fetch(offer):
            self.pulled.append((offer.version, offer.source))
            return await fetcher(offer)

        self.world = SamplerWorld(
            engine,
            wire,
            facts,
            fetch=fetch,
            make_scheduler=lambda loaded, version: FakeScheduler(engine, loaded, version),
            shelf=shelf,
            say=self.said.append,
        )
        self.server = SamplerServer(self.world, shelf, access, port=port, max_calls=64, lender=lender)

    def __enter__(self):
        self.server.__enter__()
        self.up = True
        self.address = f"127.0.0.1:{self.server.port}"
        return self

    def __exit__(self, *_):
        if self.up:
            self.server.__exit__()
        self.up = False

    def register(self, trainer, *, patience_s=600.0):
        self.server.register(
            trainer, self.address, self.facts, self.credentials, patience_s=patience_s, say=self.said.append
        )
        return self


class Proxy:
    """Passes every call on to `target`. `spoil(method, number, reply)` returns the replies to send in the place of the
    number-th one of a call, after as many seconds as it wants to wait, or raises ConnectionError to cut the call."""

    def __init__(self, target, spoil):
        self._target, self._spoil = target, spoil
        self._loop, self._stop = asyncio.new_event_loop(), asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    async def _serve(self):
        server = grpc.aio.server()
        server.add_generic_rpc_handlers([self])
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        async with grpc.aio.insecure_channel(self._target) as self._channel:
            self._ready.set()
            await self._stop.wait()
            await server.stop(None)

    def service(self, details):
        async def relay(requests, context):
            name = details.method.rpartition("/")[2]
            call = self._channel.stream_stream(details.method)(requests)
            number = 0
            try:
                async for reply in call:
                    wait_s, replies = self._spoil(name, number, reply)
                    await asyncio.sleep(wait_s)
                    for one in replies:
                        yield one
                    number += 1
            except ConnectionError as error:
                call.cancel()
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details())

        return grpc.stream_stream_rpc_method_handler(relay)


def fair(name, number, reply):
    return 0.0, [reply]


class OneReward:
    def episodes(self, task, completions):
        return [Episode(c, np.ones(len(c.tokens_T), bool), Reward(1.0, {"correct": 1.0})) for c in completions]


class Trainer:
    """A trainer without training: it takes groups, counts them and publishes the next version."""

    def __init__(
        self,
        *workers,
        run="the run",
        max_lag=2,
        token=None,
        patience_s=600.0,
        fan_out=2,
        verify_every=1,
        lends=False,
        access=None,
        credentials=None,
        tools=None,
        **links,
    ):
        self.notes, self.tools = [], tools
        tasks = [PromptTask(f"t{i}", np.array([i], np.int32), str(i), str(i), "s", "exact") for i in range(8)]
        self.issuer = GroupIssuer(PromptStream(tasks, seed=0), PassRates(retire_at=None))
        sampling = Sampling(2, stop_strings=() if tools is None else (";",))
        seconds = {"heartbeat_s": 0.1, "silence_s": 30.0, "retry_s": 0.1, "push_timeout_s": 2.0} | links
        access = access or check_access("127.0.0.1", Token(token) if token else None, None, None)
        self.fleet = Fleet(
            run,
            FACTS,
            HowToSample(sampling, 0, sampling, 1),
            access,
            credentials or Credentials(token),
            FleetOptions(
                0, None, workers, fan_out, patience_s, lends, LinkOptions(verify_every=verify_every, **seconds)
            ),
            lambda kind, words, about: self.notes.append((kind, words)),
        )
        coordinator = Coordinator(
            self.issuer,
            LagRule("pipeline", max_lag),
            prompts_per_step=P,
            group_size=G,
            back_off_s=0.05,
            tools=tools is not None,
        )
        self.worker = RolloutWorker(coordinator, OneReward(), [self.fleet], self.fleet, tools=tools)
        self.max_lag, self.version, self.trained = max_lag, 0, Counter()

    def __enter__(self):
        self.fleet.__enter__()
        self.fleet.publish(PolicyWeights(0, weights(0)))
        self.worker.start()
        return self

    def __exit__(self, *_):
        self.worker.stop()
        self.fleet.__exit__()

    def train(self, steps):
        for _ in range(steps):
            groups = self.worker.next_groups()
            for group in groups:
                self.trained[group.group_id] += 1
                assert len(group.episodes) == G
                for sibling, episode in enumerate(group.episodes):
                    turn = [group.group_id, sibling]
                    wanted = turn if self.tools is None else [*turn, ANSWER, *turn]
                    assert episode.completion.tokens_T.tolist() == wanted
                    assert self.version - self.max_lag <= episode.completion.versions_T.min()
                    assert episode.completion.versions_T.max() <= self.version
            self.issuer.settle(groups, {}, groups)
            self.version += 1
            self.worker.publish(self.version, lambda: weights(self.version))

    def balances(self):
        """Every group once, in order, and nothing lost."""
        counts = self.issuer.counts()
        assert sorted(self.trained) == list(range(P * self.version))
        assert set(self.trained.values()) == {1}
        assert counts["prompts_issued"] == counts["prompts_trained"] + counts["prompts_in_flight"]

    def kinds(self):
        return Counter(kind for kind, _ in self.notes)

    def words(self, kind):
        return [words for k, words in self.notes if k == kind]


def until(condition, seconds=120.0):
    """Wait for a condition; fails with it after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


@contextlib.contextmanager
def several(count, **how):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(FakeSampler(**how)) for _ in range(count)]
