"""What tests of programs accept and what they do not, whatever the program tries."""

import json

import pytest

from jaxrl_llm.sandbox.checks import Examination, ProgramTests


def examine(pool, tests, *sources):
    exams = [Examination(ProgramTests.parse(json.dumps(tests)), source) for source in sources]
    futures = [[pool.submit(job) for job in exam.jobs] for exam in exams]
    return [exam.verdict([f.result(timeout=60) for f in jobs]) for exam, jobs in zip(exams, futures, strict=True)]


ADD = {
    "entry_point": "add",
    "setup": "def twice(x): return 2 * x",
    "check": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(a=2, b=twice(2)) == 6\n",
}
RIGHT = "def add(a, b):\n    return a + b\n"
# Programs that are wrong, and would pass if the solution could reach the check.
CHEATS = {
    "wrong": "def add(a, b): return a - b",
    "exits at import": "import os\nos._exit(0)",
    "exits in the call": "import os\ndef add(a, b): os._exit(0)",
    "system exit": "import sys\ndef add(a, b): sys.exit(0)",
    "always equal": "class E(int):\n  def __eq__(self, other): return True\ndef add(a, b): return E(7)",
    "patched builtins": "import builtins\nbuiltins.AssertionError = Exception\ndef add(a, b): return 0",
    "raises StopIteration": "def add(a, b): raise StopIteration",
    "raises AssertionError's subclass": "class E(BaseException): pass\ndef add(a, b): raise E",
    "reads the word": "import sys\nprint(sys.stdin.read())\ndef add(a, b): return 0",
    "writes to every file it has": (
        "import os, glob\nfor p in glob.glob('/proc/[0-9]*/fd/*'):\n"
        "  try: open(p, 'w').write('x')\n  except OSError: pass\n"
        "def add(a, b): return 0"
    ),
    "reads its parent's memory": (
        "import os\ntry: print(open(f'/proc/{os.getppid()}/mem', 'rb'))\nexcept OSError: pass\ndef add(a, b): return 0"
    ),
    "forks": "import os\ndef add(a, b):\n  os.fork()\n  return 0",
    "looks up the stack": (
        "import sys\nf = sys._getframe()\nwhile f:\n  f.f_globals.update(check=lambda c: None)\n  f = f.f_back\n"
        "def add(a, b): return 0"
    ),
    "no such function": "x = 1",
    "no function": "add = 3",
    "no Python": "def add(a, b) return",
    "empty": "",
    "endless at import": "while True: pass",
    "null bytes": "def add(a, b): return a + b\0",
}


@pytest.fixture(scope="module")
def impatient(jail):
    from jaxrl_llm.sandbox.limits import Limits
    from jaxrl_llm.sandbox.pool import SandboxPool

    with SandboxPool(jail, Limits(wall_s=8.0), workers=2) as pool:
        yield pool


def test_only_right_programs_pass_a_check(impatient):
    verdicts = dict(zip(["right", *CHEATS], examine(impatient, ADD, RIGHT, *CHEATS.values()), strict=True))
    assert [name for name, verdict in verdicts.items() if verdict.all_passed] == ["right"]
    assert all(verdict.why for name, verdict in verdicts.items() if name != "right"), verdicts
    assert verdicts["endless at import"].why == "over its limit of time"


VALUES = [
    None, True, 3, -(10**60), 1.5, float("inf"), 2 + 3j, "é\n", b"\x00\xff", [1, [2]], (1, (2,)), {1, 2},
    frozenset({3}), {"a": (1, [2]), 3: None}, [], (), {}, "",
]  # fmt: skip


def test_values_cross_as_they_are(pool):
    check = "inf = float('inf')\nfor x in VALUES:\n    y = same(x)\n    assert y == x and type(y) is type(x), x\n"
    check += "assert same(float('nan')) != same(float('nan'))\nassert same(iter([1, 2])) == [1, 2]"
    tests = {"entry_point": "same", "setup": f"inf = float('inf')\nVALUES = {VALUES!r}", "check": check}
    (verdict,) = examine(pool, tests, "def same(x): return x")
    assert verdict.all_passed, verdict


def test_errors_cross_by_their_builtin_name(pool):
    check = "for kind in (ValueError, KeyError):\n  try: f(kind.__name__)\n  except kind: pass\n  else: assert False"
    source = "def f(name): raise {'ValueError': ValueError, 'KeyError': KeyError}[name]('x')"
    (verdict,) = examine(pool, {"entry_point": "f", "check": check}, source)
    assert verdict.all_passed, verdict


DOUBLE = {"cases": [{"input": "21\n", "output": "42"}, {"input": "-1", "output": "-2\n"}]}


@pytest.mark.parametrize(
    ("language", "right", "wrong"),
    [
        ("python", "print(2 * int(input()))   ", "print(42)"),
        ("cpp", "#include <iostream>\nint main(){int a;std::cin>>a;std::cout<<2*a<<std::endl;}", "int main(){}"),
        (
            "c",
            '#include <stdio.h>\nint main(){int a;scanf("%d",&a);printf("%d",2*a);return 0;}',
            "int main(){return 1;}",
        ),
        ("bash", "read a; echo $((2 * a))", "exit 3"),
    ],
)
def test_whole_programs_in_every_language(pool, language, right, wrong):
    passed, failed = examine(pool, {"language": language, **DOUBLE}, right, wrong)
    assert (passed.passed, passed.total, passed.why) == (2, 2, "")
    assert not failed.all_passed
    assert failed.why


def test_cases_count_one_by_one_and_the_first_failure_is_named(pool):
    half, broken, no_c = examine(pool, DOUBLE, "print(42)", "print(2 * int(input())); raise SystemExit(5)", "x = (")
    assert (half.passed, half.why) == (1, "wrong output")
    assert (broken.passed, broken.why) == (0, "exit code 5")
    assert no_c.why.startswith("exit code 1: SyntaxError")
    (uncompiled,) = examine(pool, {"language": "cpp", **DOUBLE}, "int main(){return x;}")
    assert uncompiled.why == "did not compile"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no JSON"),
        ("[]", "no JSON object"),
        ("{}", 'either "cases" or "check"'),
        ('{"cases": [{"input": 1, "output": "2"}]}', '"cases" is no list'),
        ('{"cases": [{"input": "1"}]}', '"cases" is no list'),
        ('{"cases": [], "check": ""}', 'either "cases" or "check"'),
        ('{"check": "x", "entry_point": "a b"}', "name of a function"),
        ('{"check": "x", "entry_point": "f", "language": "cpp"}', "needs language python"),
        ('{"check": "x", "entry_point": "f", "language": "cobol"}', "'cobol' is none of python, cpp"),
        ('{"chek": "x"}', "unknown key 'chek'"),
        ('{"check": 3, "entry_point": "f"}', "must be text"),
    ],
)
def test_tests_that_make_no_sense_are_refused(text, why):
    with pytest.raises(ValueError, match=why):
        ProgramTests.parse(text)
