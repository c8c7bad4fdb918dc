"""Calls a function nobody trusts and checks what it returns, inside the jail but in a process of its own.

The solution's process only ever answers calls. Checks run in the process that forked it, which alone knows the word
that says they passed: a solution that exits early, patches assert or builtins, or prints what it likes gains nothing.
Values cross between the two as JSON with tagged types, never as anything that can run.
"""

import json

# Both processes read and write values so.
_VALUES = """
def dump(x):
    if x is None or type(x) in (bool, int, str):
        return x
    if type(x) is float:
        return {"f": x.hex() if x - x == 0 else str(x)}
    if type(x) is complex:
        return {"c": [dump(x.real), dump(x.imag)]}
    if type(x) in (bytes, bytearray):
        return {"b": bytes(x).hex()}
    for kind, tag in ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "z")):
        if type(x) is kind:
            return {tag: [dump(y) for y in x]}
    if isinstance(x, dict):
        return {"d": [[dump(k), dump(v)] for k, v in x.items()]}
    if hasattr(x, "__next__") or type(x) is range:
        return {"l": [dump(y) for y in x]}
    raise TypeError("a value of type " + type(x).__name__ + " cannot be handed over")

def load(x):
    if not isinstance(x, dict):
        return x
    (tag, y), = x.items()
    if tag == "f":
        return float.fromhex(y) if "x" in y else float(y)
    if tag == "c":
        return complex(load(y[0]), load(y[1]))
    if tag == "b":
        return bytes.fromhex(y)
    if tag == "d":
        return {load(k): load(v) for k, v in y}
    return {"l": list, "t": tuple, "s": set, "z": frozenset}[tag](load(z) for z in y)
"""

HARNESS = (
    """
import builtins, ctypes, json, os, sys
sys.set_int_max_str_digits(0)
# Nobody of the same user may look into these processes, or through them at their files.
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
"""
    + _VALUES
    + r"""
def solve(calls, answers):
    def answer(**what):
        answers.write(json.dumps(what) + "\n")
        answers.flush()
    try:
        name = json.loads(calls.readline())
        space = {"__name__": "solution"}
        with open("solution.py", encoding="utf-8", errors="surrogatepass") as file:
            exec(compile(file.read(), "solution.py", "exec"), space)
        function = space[name]
        answer(value=None)
    except BaseException as error:
        answer(error=type(error).__name__, text=str(error)[:500])
        raise
    for line in calls:
        try:
            given, named = load(json.loads(line))
            answer(value=dump(function(*given, **named)))
        except BaseException as error:
            answer(error=type(error).__name__, text=str(error)[:500])

(theirs_in, calls), (answers, theirs_out) = os.pipe(), os.pipe()
if os.fork() == 0:
    # Before anything was read that the solution must not know.
    nothing = os.open("/dev/null", os.O_RDWR)
    os.dup2(nothing, 0), os.dup2(nothing, 1), os.close(calls), os.close(answers)
    try:
        solve(os.fdopen(theirs_in), os.fdopen(theirs_out, "w"))
    finally:
        os._exit(1)
os.close(theirs_in), os.close(theirs_out)
calls, answers = os.fdopen(calls, "w"), os.fdopen(answers)
order = json.loads(sys.stdin.read())
def ask(what):
    calls.write(json.dumps(what) + "\n")
    calls.flush()
    line = answers.readline()
    if not line:
        raise RuntimeError("the solution's process ended")
    said = json.loads(line)
    if "error" in said:
        kind = getattr(builtins, said["error"], None)
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            kind = RuntimeError
        try:
            raised = kind(said["text"])
        except TypeError:
            raised = RuntimeError(said["text"])
        raise raised
    return load(said["value"])
def candidate(*given, **named):
    return ask(dump([list(given), named]))
ask(order["entry_point"])
space = {"__name__": "check"}
exec(compile(order["setup"], "setup", "exec"), space)
space[order["entry_point"]] = candidate
exec(compile(order["check"], "check", "exec"), space)
if callable(space.get("check")):
    space["check"](candidate)
os.write(1, order["passed"].encode())
os._exit(0)
"""
)


def order(*, entry_point: str, setup: str, check: str, passed: str) -> str:
    """What HARNESS reads on its standard input; it writes the word `passed` once `check` has gone through."""
    what = {"entry_point": entry_point, "setup": setup, "check": check, "passed": passed}
    return json.dumps(what)
