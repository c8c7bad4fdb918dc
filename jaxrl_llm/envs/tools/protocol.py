"""What a tool is."""

from typing import Protocol


class ToolBrokenError(RuntimeError):
    """A tool of ours could not work: nothing is known about what it was asked."""


class Tool(Protocol):
    """Answers a text with a text at once or within the time it is given, from several threads.

    What is wrong with the question is said in the answer, which the policy reads. Raises ToolBrokenError if the fault
    is ours.
    """

    def __call__(self, asked: str) -> str: ...
