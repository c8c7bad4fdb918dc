"""How old a group's tokens may be when they are trained: the one rule that admission, hand-over and pushes obey.

A group that starts under version w has a deadline(w): the newest version it may still be trained at. Everything else is
counting (rollout/coordinator.py); the proof of the bound stands in docs/pipeline.md.
"""

from dataclasses import dataclass
from typing import Literal

Mode = Literal["sync", "ppo_off_policy", "pipeline"]


@dataclass(frozen=True)
class LagRule:
    """`sync`: sample a step's batch with the present weights, train, repeat. `ppo_off_policy`: sample the batches of
    `k` steps with one version, train `k` steps on them, repeat. `pipeline`: sample on while training; nothing is
    trained more than `k` versions late (arXiv:2510.13786). `k` means nothing to `sync`."""

    mode: Mode
    k: int = 0

    @property
    def bound(self) -> int:
        """The greatest lag, in versions, that a trained token can have."""
        return {"sync": 0, "ppo_off_policy": self.k - 1, "pipeline": self.k}[self.mode]

    @property
    def steps_out(self) -> int:
        """So many steps' groups at most are issued and not yet handed to the trainer."""
        return self.bound + 1

    def deadline(self, version: int) -> int:
        """The newest version at which a group that starts under `version` may be trained."""
        if self.mode == "ppo_off_policy":
            return version // self.k * self.k + self.k - 1
        return version + self.bound

    def publishes(self, version: int) -> bool:
        """Whether samplers get this version at all."""
        return self.mode != "ppo_off_policy" or version % self.k == 0
