"""Random schedules of trainer, samplers and network around the real rules, and the same with bugs planted in them."""

import inspect
import types

import pytest

from jaxrl_llm.pipeline import schedules
from jaxrl_llm.pipeline.schedules import random_simulation, run_schedule
from jaxrl_llm.rollout import coordinator, issue, lag

# Every rule is checked inside: no deadlock, the ledger balances, versions go up, lag stays within the bound, no token
# comes from other weights than its version, no batch of sync or ppo_off_policy mixes versions, nothing trains twice,
# every completion has all of its turns and answers in their places.


def test_no_random_schedule_breaks_a_rule():
    kinds, done, lags, modes, turns = set(), set(), set(), set(), set()
    for seed in range(700):
        simulation, disturb = random_simulation(seed)
        books = simulation.run(max_events=5000, disturb=disturb)
        kinds |= {event.kind for event in simulation.events}
        done |= set(disturb.done)
        modes.add((simulation.trainer.coordinator.rule.mode, books.lag_max))
        lags.add(books.lag_max)
        turns |= {simulation.spec.turns(stream, 0) for stream in range(3)}
    # The schedules do exercise what they claim to.
    assert kinds == {"joined", "left", "retried", "dropped", "straggler", "silent", "heard"}
    assert done == {"kill", "stop", "trainer"}
    assert turns == {1, 2, 3}
    assert {mode for mode in modes if mode[0] == "pipeline"} == {("pipeline", n) for n in range(4)}
    assert {mode for mode in modes if mode[0] == "ppo_off_policy"} == {("ppo_off_policy", n) for n in range(3)}
    assert {mode for mode in modes if mode[0] == "sync"} == {("sync", 0)}


@pytest.mark.slow
def test_no_schedule_of_ten_thousand_breaks_a_rule():
    for seed in range(10_000):
        run_schedule(seed)


def test_a_process_that_is_dead_fetches_no_weights():
    simulation, _ = random_simulation(3)
    host = simulation.hosts[0]
    host._pushing = False  # the transfer of its first weights has broken off
    host.crash(0.1, 50.0)
    host.push()
    while simulation.clock.now < 40 and simulation.clock.step():
        assert host.name not in simulation.trainer.coordinator.samplers


def test_a_schedule_repeats_itself():
    one, other = (random_simulation(11) for _ in range(2))
    assert one[0].run(max_events=5000, disturb=one[1]) == other[0].run(max_events=5000, disturb=other[1])
    assert one[0].records == other[0].records
    assert [event.words for event in one[0].events] == [event.words for event in other[0].events]


COUNTED = "len(self._groups) // self._per_step <= deadline"
ANSWERED = " or run.sampler != sampler or sibling not in run.siblings:"
PLANTED = {
    "a lag of one more": (lag, "return version + self.bound", "return version + self.bound + 1"),
    "a generation of one step more": (lag, "self.k * self.k + self.k - 1", "self.k * self.k + self.k"),
    "every version published": (lag, "or version % self.k == 0", "or True"),
    "one group too many": (coordinator, COUNTED, "(len(self._groups) - 1) // self._per_step <= deadline"),
    "no slots counted": (coordinator, COUNTED, "0 <= deadline"),
    "groups due counted one short": (coordinator, "due[deadline] += 1\n", "due[deadline] += 0\n"),
    "a step too many for groups due": (coordinator, "(version_due - self._step + 1)", "(version_due - self._step + 2)"),
    "first finished, whatever is due": (coordinator, "needed = total - ", "needed = -1 - total - "),
    "a retry on any version": (coordinator, "if self._rule.deadline(s.version) >= needed", "if True"),
    "handed over and kept": (coordinator, "group = self._groups.pop(group_id)", "group = self._groups[group_id]"),
    "slots lost with an attempt": (coordinator, ".in_flight -= len(run.siblings)", ".in_flight -= 0"),
    "slots lost with a completion": (coordinator, "known.in_flight - 1,", "known.in_flight,"),
    "work lost with a sampler": (coordinator, "if run.sampler == sampler]:", "if False]:"),
    "the missing forgotten": (coordinator, "sorted([*group.missing, *run.siblings])", "[]"),
    "a silent sampler for good": (coordinator, "known.silent = False", "pass"),
    "any answer taken": (coordinator, ANSWERED, ":"),
    "a turn on any version": (coordinator, "[s for s in able if s.version >= newest]", "able"),
    "the turns before forgotten": (coordinator, "completion = extended(group.turns[sibling].completion, ", "(0, "),
    "a call lost": (coordinator, "self._calls.append(call)", "pass"),
    "a tool's answer that begins anew": (coordinator, "group.turns[call.sibling] = turn", "pass"),
    "scored while a tool works": (coordinator, "and not group.calls and", "and"),
    "a ledger that forgets": (issue, "self._ledger.drop(group_id, reason)\n\n", "pass\n\n"),
    "in flight forgotten at a restart": (issue, "list(self._ledger.in_flight.items())", "[]"),
}


def planted(monkeypatch, module, right, wrong):
    """Have the simulator run a copy of `module` with a bug in it, and everything else as it is."""
    source = inspect.getsource(module)
    assert source.count(right) == 1, right
    broken = types.ModuleType(module.__name__)
    broken.__dict__["__name__"] = module.__name__
    exec(compile(source.replace(right, wrong), module.__file__, "exec"), broken.__dict__)
    if module is coordinator:
        monkeypatch.setattr(schedules, "Coordinator", broken.Coordinator)
    elif module is lag:
        monkeypatch.setattr(schedules, "LagRule", broken.LagRule)
    else:
        monkeypatch.setattr("jaxrl_llm.pipeline.simulation.GroupIssuer", broken.GroupIssuer)


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_caught(monkeypatch, bug):
    planted(monkeypatch, *PLANTED[bug])
    for seed in range(200):
        try:
            run_schedule(seed)
        except (AssertionError, RuntimeError, KeyError, ValueError):
            return
    pytest.fail(f"{bug}: no schedule of 200 minded")
