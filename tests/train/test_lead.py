"""Who says and does what in a trainer of several processes, with threads and plain functions in their place.

tests/cli/test_launch_local.py has real processes.
"""

import queue
import threading

import numpy as np
import pytest

from jaxrl_llm.rollout.batching import supervised
from jaxrl_llm.rollout.rows import RowShape, pack
from jaxrl_llm.train.lead import Lead, SharedWork, follow
from jaxrl_llm.train.state import TrainState
from jaxrl_llm.types import RunFailedError, UserError

SHAPE = RowShape(2, 2, 8)
PROBE = RowShape(1, 2, 8)


class Hall:
    """Two worlds in one process: what the first says, and exchanges at which both meet."""

    def __init__(self):
        self.said, self._meeting, self._brought = queue.Queue(), threading.Barrier(2, timeout=20), {}

    def meet(self, first, brought):
        self._brought[first] = brought
        self._meeting.wait()
        both = dict(self._brought)
        self._meeting.wait()
        return both


class OneOfTwo:
    count = 2

    def __init__(self, hall, first):
        self.hall, self.first = hall, first

    def announce(self, text):
        self.hall.said.put(text)

    def hear(self):
        return self.hall.said.get(timeout=20)

    def from_first(self, arrays):
        return self.hall.meet(self.first, [np.asarray(x) for x in arrays])[True]

    def any_process(self, flag):
        return any(self.hall.meet(self.first, flag).values())


class Notebook:
    """Work that only writes down what it was asked; a state is a number that goes up."""

    def __init__(self):
        self.did = []

    def work(self):
        def train_step(state, batch):
            self.did.append(("step", state.params["n"].item(), batch.targets.sum().item(), batch.scores.sum().item()))
            return TrainState(params={"n": state.params["n"] + 1}, opt_state=None, step=0), {}

        def sent(params):
            self.did.append(("weights", params["n"].item()))
            return {"w": params["n"]}

        def score(params, tokens, targets, positions, segments):
            self.did.append(("score", params["n"].item(), tokens.tolist(), segments.sum().item()))
            return tokens * 2

        def save(step, state, counters):
            self.did.append(("save", step, state.params["n"].item(), dict(counters)))

        return SharedWork(train_step, SHAPE, None, sent, score, PROBE, save)


def together(lead_does, *, asked=(False, False)):
    """What both have done, how the first ended and how the other did: a value or an error."""
    hall, books, ends = Hall(), (Notebook(), Notebook()), {}

    def ending(who, run):
        try:
            ends[who] = run()
        except BaseException as error:
            ends[who] = error

    first, other = OneOfTwo(hall, True), OneOfTwo(hall, False)
    lead = Lead(first, books[0].work())
    start = TrainState(params={"n": np.float32(0)}, opt_state=None, step=0)
    threads = [
        threading.Thread(target=ending, args=("first", lambda: lead.to_the_end(lambda: lead_does(lead, start)))),
        threading.Thread(
            target=ending, args=("other", lambda: follow(other, books[1].work(), start, lambda: asked[1]))
        ),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return books[0].did, books[1].did, ends["first"], ends["other"]


def batch(number):
    return pack(supervised([np.int32([1, 2])], [np.int32([number, 4])]), SHAPE)


def test_the_others_do_the_same_work_on_the_same_numbers():
    def run(lead, state):
        state, _ = lead.train_step(state, batch(5))
        assert lead.weights(state.params) == {"w": 1.0}
        rows = pack(supervised([np.int32([1])], [np.int32([7, 8])]), PROBE)
        fields = (rows.tokens, rows.targets, rows.positions, rows.segment_ids)
        assert lead.score(state.params, *(field[0] for field in fields)).max() == 14
        state, _ = lead.train_step(state, batch(6))
        lead.save(2, state, {"tokens": 3})
        assert lead.stop_requested(lambda: False)  # the other was asked
        return "interrupted"

    mine, theirs, how, also = together(run, asked=(False, True))
    assert (how, also) == ("interrupted", "interrupted")
    assert [each[:3] for each in mine] == [each[:3] for each in theirs]
    assert [each[0] for each in mine] == ["step", "weights", "score", "step", "save"]
    assert [each[1] for each in mine] == [0, 1, 1, 1, 2]
    assert [each[2] for each in mine if each[0] == "step"] == [2 + 5 + 4, 2 + 6 + 4]
    # Only the first has the books.
    assert (mine[-1][3], theirs[-1][3]) == ({"tokens": 3}, {})


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (RunFailedError("the loss is not finite"), RunFailedError, "process 0: the loss is not finite"),
        (UserError("no space"), UserError, "process 0: no space"),
        (FloatingPointError("device on fire"), RunFailedError, "process 0: FloatingPointError: device on fire"),
        (KeyboardInterrupt(), RunFailedError, "process 0: KeyboardInterrupt: "),
    ],
)
def test_an_error_of_the_first_ends_the_others_with_its_words(error, kind, message):
    def run(lead, state):
        lead.train_step(state, batch(5))
        raise error

    _, theirs, how, also = together(run)
    assert how is error
    assert (type(also), str(also)) == (kind, message)
    assert len(theirs) == 1
