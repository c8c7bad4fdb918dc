"""Tasks of the reasoning-gym package, from an allow-list.

Allowed is what has one right answer, which the generator knows, so that equality decides and none of the package's own
scorers is called (some execute the answer, some pay for any text); whose items depend on their number alone, not on
hash seeds or on what was drawn before; and which takes milliseconds an item.
"""

import importlib
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.data.problem import Problem, Split
from jaxrl_llm.data.prompts import plain_text
from jaxrl_llm.types import UserError

ALLOWED = (
    "aiw", "base_conversion", "basic_arithmetic", "binary_alternation", "caesar_cipher", "chain_sum", "count_bits",
    "count_primes", "course_schedule", "gcd", "largest_island", "lcm", "leg_counting", "letter_counting", "maze",
    "number_filtering", "rotate_matrix", "rotten_oranges", "simple_equations", "spell_backward", "string_manipulation",
    "syllogism", "word_sequence_reversal",
)  # fmt: skip

_SEED_STRIDE = (
    2**32
)  # item i of the package has the seed `seed + i`, so neighbouring seeds would share nearly all items
_MOST_DRAWS = 20  # items drawn for each that is wanted, before the task is said to have no more


def reasoning_gym(task: str, options: Mapping[str, Any], *, heldout: int, train: int, seed: int) -> Split:
    """`heldout` and `train` items of `task` with different questions, drawn one after the other.

    Raises UserError if the package is missing, for a task that is not allowed, options that it refuses, and where it
    does not make so many different questions.
    """
    if task not in ALLOWED:
        raise UserError(f"reasoning-gym task {task!r} is not on the allow-list: {', '.join(ALLOWED)}")
    if taken := sorted({"seed", "size"} & options.keys()):
        raise UserError(f"options may not hold {taken[0]!r}: data.seed, heldout and train decide it")
    try:
        package = importlib.import_module("reasoning_gym")
    except ImportError as error:  # of the package, or of something it needs
        raise UserError(
            f"reasoning-gym cannot be imported ({error}): pip install 'jaxrl_llm[reasoning-gym]' (with a C compiler)"
        ) from None
    wanted = heldout + train
    try:
        items = package.create_dataset(task, seed=seed * _SEED_STRIDE, size=_MOST_DRAWS * wanted, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"reasoning-gym task {task} refuses its options {dict(options)}: {error}") from None
    found: dict[str, Problem] = {}
    for index in range(_MOST_DRAWS * wanted):
        item = items[index]
        question, answer = str(item["question"]), str(item["answer"])
        if question.strip() and answer.strip():
            found.setdefault(plain_text(question), Problem(str(index), question, answer.strip()))
        if len(found) == wanted:
            problems = list(found.values())
            return Split(problems[heldout:], problems[:heldout])
    raise UserError(
        f"reasoning-gym task {task} makes only {len(found)} different questions in {_MOST_DRAWS * wanted} draws; "
        "ask for fewer with heldout and train, or change its options"
    )
