"""The thread that owns a scheduler: streams, refusals, aborts, pausing, failing and ending, on a scripted scheduler."""

import asyncio
import threading
import time

import numpy as np
import pytest
from scripted_scheduler import ScriptedScheduler, no_test_waits_for_ever, scripted  # noqa: F401

from jaxrl_llm.sampler.reply import Reply, join
from jaxrl_llm.sampler.service import SamplerClosedError, SamplerService
from jaxrl_llm.types import QueueFullError, SampleRequest, Sampling, UserError


def ask(stream=0, *, new=5, prompt=(3, 4)):
    return SampleRequest(np.array(prompt, np.int32), Sampling(new), stream=stream)


def collect(reply):
    parts = {}
    for index, delta in reply:
        parts.setdefault(index, []).append(delta)
    return parts


def wait_until(condition):
    """For what another thread is about to do."""
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.001)


def test_a_streams_deltas_are_the_completion():
    with SamplerService(ScriptedScheduler()) as service, service.submit([ask(7), ask(11, new=3)]) as reply:
        parts = collect(reply)
    for index, request in enumerate((ask(7), ask(11, new=3))):
        whole = join(parts[index])
        tokens, logprobs = scripted(request)
        np.testing.assert_array_equal(whole.tokens_T, tokens)
        np.testing.assert_array_equal(whole.logprobs_T, logprobs)
        assert whole.finish == "length"
        assert [d.finish for d in parts[index][:-1]] == [None] * (len(parts[index]) - 1)


def test_nobody_is_told_it_is_ready_before_everything_is_compiled():
    scheduler, compiled = ScriptedScheduler(), threading.Event()
    scheduler.warm_up = lambda: compiled.wait(20)
    with SamplerService(scheduler, warm_up=True) as service:
        assert (service.health.state, service.health.live, service.health.ready) == ("starting", True, False)
        assert not service.started.done()
        with service.submit([ask()]) as reply:
            assert scheduler.stepped == 0
            compiled.set()
            service.started.result(timeout=20)
            assert join(collect(reply)[0]).finish == "length"
        assert (service.health.state, service.health.ready) == ("running", True)


def test_a_sampler_that_cannot_compile_says_so(caplog):
    scheduler = ScriptedScheduler()
    scheduler.warm_up = lambda: 1 / 0
    with SamplerService(scheduler, warm_up=True) as service:
        with pytest.raises(SamplerClosedError, match="ZeroDivisionError"):
            service.started.result(timeout=20)
        assert (service.health.state, service.health.ready) == ("failed", False)


def test_tokens_come_while_the_rest_is_made():
    scheduler = ScriptedScheduler(gated=True)
    with SamplerService(scheduler) as service, service.submit([ask(new=3)]) as reply:
        scheduler.let(1)
        index, delta = next(reply)  # there is no second dispatch yet
        assert (index, delta.tokens_T.tolist(), delta.finish, scheduler.dispatched) == (0, [0], None, 1)
        scheduler.let(2)
        assert sum(len(delta.tokens_T) for _, delta in reply) == 2


def test_a_reader_that_lags_gets_one_long_delta_and_holds_nobody_up():
    with SamplerService(ScriptedScheduler()) as service:
        slow = service.submit([ask(1, new=8)])
        assert len(service.sample([ask(2, new=8)])[0].tokens_T) == 8
        assert len(service.sample([ask(3, new=8)])[0].tokens_T) == 8
        (pair,) = list(slow)
        assert pair[1].tokens_T.tolist() == scripted(ask(1, new=8))[0].tolist()


def test_without_streaming_a_request_answers_once():
    with SamplerService(ScriptedScheduler()) as service, service.submit([ask(), ask()], stream=False) as reply:
        assert {index: len(parts) for index, parts in collect(reply).items()} == {0: 1, 1: 1}


def test_async_and_sync_readers_see_the_same():
    async def read(service):
        with service.submit([ask(5), ask(6)]) as reply:
            ids = await asyncio.wrap_future(reply.accepted)
            parts = {}
            async for index, delta in reply:
                parts.setdefault(index, []).append(delta)
        return ids, parts

    with SamplerService(ScriptedScheduler()) as service:
        ids, parts = asyncio.run(read(service))
        assert ids == [0, 1]
        for index, whole in enumerate(service.sample([ask(5), ask(6)])):
            np.testing.assert_array_equal(join(parts[index]).tokens_T, whole.tokens_T)
            np.testing.assert_array_equal(join(parts[index]).logprobs_T, whole.logprobs_T)


def test_a_bad_request_fails_alone():
    scheduler = ScriptedScheduler(gated=True)
    with SamplerService(scheduler) as service:
        good = service.submit([ask(new=2)])
        good.accepted.result()
        bad = service.submit([ask(prompt=range(7))])
        scheduler.let(2)
        with pytest.raises(UserError, match="7 tokens"):
            list(bad)
        assert join(collect(good)[0]).finish == "length"
        assert service.health.state == "running"


def test_the_queue_is_bounded_and_frees_up_again():
    scheduler = ScriptedScheduler(slots=1, max_queue=2, gated=True)
    with SamplerService(scheduler) as service:
        first = service.submit([ask(new=1)])
        wait_until(lambda: scheduler._running)  # it has left the queue
        second = service.submit([ask(new=1), ask(new=1)])
        scheduler.let(1)
        second.accepted.result()
        flood = service.submit([ask(new=1), ask(new=1)])
        scheduler.let(10)
        with pytest.raises(QueueFullError, match="of 2"):
            list(flood)
        assert collect(first).keys() == {0}
        assert collect(second).keys() == {0, 1}
        assert len(service.sample([ask(new=1), ask(new=1)])) == 2


def test_closing_a_reply_frees_its_slot():
    scheduler = ScriptedScheduler(slots=1, gated=True)
    with SamplerService(scheduler) as service:
        with service.submit([ask(1, new=8)]) as left:
            scheduler.let(1)
            next(left)
        waiting = service.submit([ask(2, new=1)], stream=False)
        waiting.accepted.result()
        scheduler.let(1)
        assert [delta.finish for _, delta in waiting] == ["length"]
        assert scheduler.dispatched == 2
        assert list(left) == []


def test_a_call_that_is_closed_before_it_was_taken_never_runs():
    scheduler, busy = ScriptedScheduler(), threading.Event()
    with SamplerService(scheduler) as service:
        service._call(busy.wait)
        service.submit([ask(new=8)]).close()
        busy.set()
        assert len(service.sample([ask(new=1)])) == 1
        assert scheduler._next == 1


def test_a_close_that_crosses_the_acceptance_still_aborts():
    aborted = []
    reply = Reply(aborted.append)
    reply.accepted.set_running_or_notify_cancel()  # the owner is about to submit
    reply.close()
    reply._begin([0])
    assert aborted == [reply]
    assert list(reply) == []


def test_abort_by_id():
    scheduler = ScriptedScheduler(gated=True)
    with SamplerService(scheduler) as service:
        reply, other = service.submit([ask(1, new=8), ask(2, new=8)]), service.submit([ask(3, new=2)])
        scheduler.let(1)
        gone = reply.accepted.result()[0]
        stopped = service.abort([gone])
        scheduler.let(9)
        assert stopped.result() == ([gone], [])
        parts = collect(reply)
        assert join(parts[0]).finish == "aborted"
        assert 1 <= len(join(parts[0]).tokens_T) < 8
        assert join(parts[1]).finish == "length"
        assert join(collect(other)[0]).finish == "length"
        assert service.abort([gone]).result() == ([], [gone])
        with pytest.raises(UserError, match="no request has the id 99"):
            service.abort([gone, 99]).result()


def test_weights_change_in_mid_stream():
    scheduler = ScriptedScheduler(gated=True)
    with SamplerService(scheduler) as service, service.submit([ask(new=6)]) as reply:
        scheduler.let(2)
        first = [next(reply)[1]]
        swapping = threading.Thread(target=service.update_weights, args=({}, 4))
        swapping.start()
        scheduler.let(1)
        swapping.join()
        scheduler.let(9)
        versions = join(first + [delta for _, delta in reply]).versions_T.tolist()
        assert versions == sorted(versions)
        assert set(versions) == {0, 4}
        assert len(versions) == 6
        assert service.health.version == 4
        with pytest.raises(UserError, match="only go up"):
            service.update_weights({}, 4)


def test_pause_holds_everything_and_resume_goes_on():
    scheduler = ScriptedScheduler()
    with SamplerService(scheduler) as service:
        service.pause().result()
        reply = service.submit([ask(new=3)])
        reply.accepted.result()
        assert service.health.state == "paused"
        steps = scheduler.stepped
        time.sleep(0.05)
        assert scheduler.stepped <= steps + 1  # it waits, and does not look again and again
        assert scheduler.dispatched == 0
        with pytest.raises(UserError, match="paused"):
            service.drain().result()
        service.resume().result()
        assert join(collect(reply)[0]).finish == "length"


def test_an_abort_is_answered_while_paused():
    with SamplerService(ScriptedScheduler()) as service:
        service.pause().result()
        reply = service.submit([ask(new=3)])
        service.abort(reply.accepted.result()).result()
        assert join(collect(reply)[0]).finish == "aborted"


def test_drain_finishes_what_runs_and_takes_nothing_new():
    scheduler = ScriptedScheduler(gated=True)
    with SamplerService(scheduler) as service:
        reply = service.submit([ask(new=3)])
        reply.accepted.result()
        drained = service.drain()
        late = service.submit([ask(new=1)])
        scheduler.let(1)
        with pytest.raises(SamplerClosedError, match="drains"):
            list(late)
        assert not drained.done()
        scheduler.let(2)
        drained.result()
        assert join(collect(reply)[0]).finish == "length"
        assert service.health.state == "drained"
        service.resume().result()
        scheduler.let(1)
        assert len(service.sample([ask(new=1)])) == 1


def test_a_fatal_error_ends_every_stream_and_health_says_so(caplog):
    scheduler = ScriptedScheduler(gated=True)
    with SamplerService(scheduler) as service:
        replies = [service.submit([ask(new=8)]), service.submit([ask(new=8)], stream=False)]
        replies[1].accepted.result()
        drained = service.drain()
        scheduler.broken = FloatingPointError("not finite")
        scheduler.let(1)
        for reply in replies:
            with pytest.raises(SamplerClosedError, match="FloatingPointError: not finite"):
                list(reply)
        with pytest.raises(SamplerClosedError):
            drained.result()
        with pytest.raises(SamplerClosedError, match="not finite"):
            service.sample([ask()])
        with pytest.raises(SamplerClosedError):
            service.pause().result()
        health = service.health
        assert (health.state, health.live) == ("failed", False)
        assert "not finite" in health.error


def test_stopping_ends_open_streams():
    service = SamplerService(ScriptedScheduler()).start()
    service.pause().result()
    reply = service.submit([ask()])
    reply.accepted.result()
    service.stop()
    with pytest.raises(SamplerClosedError, match="shut down"):
        next(reply)
    with pytest.raises(SamplerClosedError, match="shut down"):
        service.sample([ask()])
    assert service.health.state == "stopped"


def test_many_threads_at_once():
    """Every call gets its own tokens, whatever the others do; the scheduler checks that one thread touches it."""
    wrong = []

    def client(service, k):
        for n in range(8):
            request = ask(k * 31 + n, new=1 + (k + n) % 8)
            if (k + n) % 3 == 0:
                service.submit([request]).close()
                continue
            (completion,) = service.sample([request])
            if completion.tokens_T.tolist() != scripted(request)[0].tolist():
                wrong.append(request)

    with SamplerService(ScriptedScheduler()) as service:
        threads = [threading.Thread(target=client, args=(service, k)) for k in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait_until(lambda: service.health.in_flight == 0)
    assert not wrong
