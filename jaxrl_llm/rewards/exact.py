"""Exact-match reward."""

from jaxrl_llm.types import Reward


def exact_match(completion: str, answer: str, *, finished: bool, correct: float, wrong: float) -> Reward:
    """`correct` if the completion ended by itself and its text is the answer, else `wrong`.

    Surrounding white space is ignored. A truncated completion is wrong whatever its text: it never said it was done.
    """
    right = finished and completion.strip() == answer.strip()
    return Reward(value=correct if right else wrong, parts={"correct": float(right)})
