"""Functions that a pool of reward workers is given: the good, the slow and the deadly."""

import ctypes
import os
import signal
import time
from pathlib import Path


def double(number):
    return 2 * number


def misbehave(how, number=0.0):
    """What models and users do to rewards."""
    match how:
        case "sleep":
            time.sleep(3600)
        case "spin":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                pass
        case "exit":
            os._exit(0)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            ctypes.string_at(0)
        case "raise":
            raise ValueError("half a pair \ud800 and \0")
        case "nan":
            return float("nan")
        case "inf":
            return "-inf"
        case "text":
            return "no number"
        case "huge":
            return 10**400
        case "memory":
            return len([bytearray(1 << 24) for _ in range(1 << 20)])
        case "recursion":
            return misbehave(how)
        case "close":
            os.closerange(3, 64)
        case "flood":
            os.write(1, b"x" * 1000)
            print("y" * 100_000)
            for fd in range(3, 64):
                try:
                    os.write(fd, b"\xff" * 100)
                except OSError:
                    continue
    return number


def pid():
    return os.getpid()


def waits(seconds):
    time.sleep(seconds)
    return seconds


def spins(started):
    """Hangs once it has left a file behind."""
    Path(started).write_text(str(os.getpid()))
    while True:
        pass
