"""One RL run over several processes: the first one decides, all of them do the device work it announces.

    first:   run_loop with a Lead's functions as its parts: rollouts, rewards, selection, books, records
                 | what comes next (world.announce), the packed batch (world.from_first)
    others:  follow: the same step, the same gathering of weights, score, checkpoint, stop

Work on arrays of all processes begins in all of them at once or hangs, so none is done without being announced.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxrl_llm.global_arrays import each_to_host, to_host
from jaxrl_llm.rollout.rows import RowShape, pack
from jaxrl_llm.train.state import TrainState
from jaxrl_llm.train.step import TrainStep
from jaxrl_llm.types import Params, RunFailedError, TrainBatch, UserError
from jaxrl_llm.world import World

_ERRORS = {"UserError": UserError, "RunFailedError": RunFailedError}


@dataclass(frozen=True)
class SharedWork:
    """What all processes do alike. `policy` makes plain weights of what is trained, `sent` the form they travel in;
    `score` is train.step.make_score's for [B, T] rows of `probe_shape` (one microbatch); `save(step, state, counters)`.
    """

    train_step: TrainStep
    row_shape: RowShape
    policy: Callable[[Params], Params]
    sent: Callable[[Params], Params]
    score: Callable[..., jax.Array]
    probe_shape: RowShape
    save: Callable[[int, TrainState, Mapping[str, Any]], None]


def gathered(params: Params, *, keep: bool) -> Params | None:
    """Arrays of all processes as numpy arrays, leaf by leaf.

    All processes must call it. Where `keep` is False nothing is kept and the result is None.
    """
    leaves, tree = jax.tree.flatten(params)
    kept = [leaf for leaf in each_to_host(leaves) if keep]
    return jax.tree.unflatten(tree, kept) if keep else None


class Lead:
    """The first process's side: parts for the loop that call the others to the same work first.

    In a world of one process it only does the work.
    """

    def __init__(self, world: World, work: SharedWork):
        self._world, self._work = world, work

    def train_step(self, state: TrainState, batch: TrainBatch):
        self._say("step")
        return self._work.train_step(state, _shared(self._world, batch))

    def weights(self, params: Params) -> Params:
        """What samplers in other processes get: on the devices in a world of one process, else on the host. `params`
        must be those of the newest state."""
        if self._world.count == 1:
            return self._work.sent(params)
        self._say("weights")
        return gathered(self._work.sent(params), keep=True)

    def score(self, params: Params, *rows: np.ndarray) -> np.ndarray:
        """Log-probabilities of int32 rows of the probe's shape; `params` must be those of the newest state."""
        self._say("score")
        return to_host(self._work.score(params, *self._world.from_first(rows)))

    def save(self, step: int, state: TrainState, counters: Mapping[str, Any]) -> None:
        self._say("save", step=step)
        self._work.save(step, state, counters)

    def stop_requested(self, asked: Callable[[], bool]) -> bool:
        self._say("stop")
        return self._world.any_process(asked())

    def to_the_end(self, run: Callable[[], str]) -> str:
        """`run()`, and the others told how it ended: "finished", "interrupted", or its error, which is raised here too.

        Whatever in the first process comes after the last step the others did without being asked belongs inside.
        """
        try:
            outcome = run()
        except BaseException as error:
            kind = type(error).__name__
            message = str(error) if kind in _ERRORS else f"{kind}: {error}"
            self._say("end", error=kind, message=message)
            raise
        self._say("end", outcome=outcome)
        return outcome

    def _say(self, what: str, **more: Any) -> None:
        self._world.announce(json.dumps({"do": what, **more}))


def follow(world: World, work: SharedWork, state: TrainState, asked: Callable[[], bool]) -> str:
    """The other processes' side; returns how the run ended, "finished" or "interrupted".

    Raises what ended the first process: UserError, or RunFailedError for anything else.
    """
    scored = pack([], work.probe_shape)
    while True:
        told = json.loads(world.hear())
        match told["do"]:
            case "step":
                state, _ = work.train_step(state, _shared(world, pack([], work.row_shape)))
            case "weights":
                gathered(work.sent(state.params), keep=False)
            case "score":
                fields = (scored.tokens, scored.targets, scored.positions, scored.segment_ids)
                rows = [np.asarray(field)[0] for field in fields]
                to_host(work.score(state.params, *world.from_first(rows)))
            case "save":
                work.save(told["step"], state, {})
            case "stop":
                world.any_process(asked())
            case "end":
                if "error" not in told:
                    return told["outcome"]
                raise _ERRORS.get(told["error"], RunFailedError)(f"process 0: {told['message']}")


def _shared(world: World, batch: TrainBatch) -> TrainBatch:
    leaves, tree = jax.tree.flatten(batch)
    return jax.tree.unflatten(tree, world.from_first([np.asarray(leaf) for leaf in leaves]))
