"""Messages between trainer and samplers in virtual time."""

from collections.abc import Callable, Sequence
from typing import Protocol

from jaxrl_llm.pipeline.clock import Clock


class Network(Protocol):
    """How messages travel. `deliveries(kind)` gives the delay in seconds of every copy of a message that arrives: none
    if it is lost, two if it comes twice. `push()` gives the seconds a transfer of weights takes and whether it arrives
    whole; `refuses()` whether a sampler refuses what it is asked for."""

    def deliveries(self, kind: str) -> Sequence[float]: ...

    def push(self) -> tuple[float, bool]: ...

    def refuses(self) -> bool: ...


class SteadyNetwork:
    """Nothing is lost, and everything takes its time."""

    def __init__(self, *, message_s: float, push_s: float):
        self._message_s, self._push_s = message_s, push_s

    def deliveries(self, kind: str) -> Sequence[float]:
        return (self._message_s,)

    def push(self) -> tuple[float, bool]:
        return self._push_s, True

    def refuses(self) -> bool:
        return False


def send(clock: Clock, network: Network, kind: str, receive: Callable[[], None]) -> None:
    """Have `receive` called whenever a copy of this message arrives."""
    for delay_s in network.deliveries(kind):
        clock.after(delay_s, receive)
