"""What a program may use up, and how its run can end."""

from dataclasses import dataclass
from typing import Literal

Ending = Literal["exited", "signalled", "time", "memory", "output"]


@dataclass(frozen=True)
class Limits:
    """Limits of one run; `wall_s` counts from the moment the program is handed over.

    `memory_bytes` bounds each process's address space and the resident memory of all of them together; `output_bytes`
    stdout and stderr each; `disk_bytes` the files it writes.
    """

    wall_s: float = 10.0
    memory_bytes: int = 512 * 2**20
    processes: int = 32
    output_bytes: int = 2**20
    disk_bytes: int = 64 * 2**20
    open_files: int = 64


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `code` is the exit code of one that "exited", the signal's number of one that was "signalled".

    The other endings name the limit it went over: time, memory (of all its processes together), output. A single
    process that asks for more address space than it may have is refused by the kernel and ends as it chooses.
    """

    ending: Ending
    code: int
    stdout: bytes
    stderr: bytes
    seconds: float

    @property
    def succeeded(self) -> bool:
        return self.ending == "exited" and self.code == 0
