"""The languages that programs may be in, and the start of every program inside the jail."""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Runs inside the jail, in a Python that was started before there was anything to run. It says READY, then takes
# the program off the front of its standard input, byte for byte, so that what is left of it is the program's own.
_START = """
import json, os, struct
os.write(1, b"\\0")
def take(n):
    data = b""
    while len(data) < n:
        part = os.read(0, n - len(data))
        if not part:
            os._exit(0)
        data += part
    return data
size, = struct.unpack(">Q", take(8))
job = json.loads(take(size))
for name, text in job["files"].items():
    with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(text)
if job["compile"]:
    import subprocess
    done = subprocess.run(job["compile"], stdin=subprocess.DEVNULL)
    if done.returncode:
        os._exit(job["failed"])
if job["run"]:
    os.execv(job["run"][0], job["run"])
import sys
main = {"__name__": "__main__", "__builtins__": __builtins__, "__file__": job["main"]}
sys.argv = [job["main"]]
sys.path.insert(0, os.getcwd())
with open(job["main"], encoding="utf-8", errors="surrogatepass") as file:
    source = file.read()
exec(compile(source, job["main"], "exec"), main)
"""
COMPILE_FAILED = 97  # the exit code of a program that did not compile
INTERPRETER = "/usr/bin/python3"
START = (INTERPRETER, "-I", "-c", _START)


@dataclass(frozen=True)
class Language:
    """`main` is the source file's name in the working folder; `compile` and `run` are argument vectors there, their
    first a path. An empty `run` means Python in the process that waits already."""

    main: str
    compile: tuple[str, ...] = ()
    run: tuple[str, ...] = ()

    @property
    def needs(self) -> list[str]:
        """The programs that the system must have."""
        return [INTERPRETER, *(argv[0] for argv in (self.compile, self.run) if argv and argv[0].startswith("/usr/"))]

    def missing(self) -> list[str]:
        return [path for path in self.needs if not Path(path).exists()]


LANGUAGES: Mapping[str, Language] = {
    "python": Language("main.py"),
    "cpp": Language(
        "main.cpp", compile=("/usr/bin/g++", "-std=c++17", "-O2", "-o", "main", "main.cpp"), run=("./main",)
    ),
    "c": Language("main.c", compile=("/usr/bin/gcc", "-O2", "-o", "main", "main.c", "-lm"), run=("./main",)),
    "bash": Language("main.sh", run=("/usr/bin/bash", "main.sh")),
}


def job(language: Language, source: str, stdin: str = "", files: Mapping[str, str] | None = None) -> bytes:
    """What a waiting START reads: the program, then the program's own input."""
    order = {
        "files": {**(files or {}), language.main: source},
        "main": language.main,
        "compile": _listed(language.compile),
        "run": _listed(language.run),
        "failed": COMPILE_FAILED,
    }
    head = json.dumps(order).encode()
    return struct.pack(">Q", len(head)) + head + stdin.encode("utf-8", "surrogatepass")


def _listed(argv: Sequence[str]) -> list[str]:
    return list(argv)
