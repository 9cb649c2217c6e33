"""Rewards that misbehave, one way each; named by dotted path in the tests."""

import ctypes
import faulthandler
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RANGE = (0.0, 2.0)


def good(completion: str, answer: str, metadata: dict[str, Any]) -> float:
    return len(completion) / 10


def by_name(completion: str, answer: str, metadata: dict[str, Any]) -> Any:
    """Does what the completion says."""
    return globals()[completion](completion, answer, metadata) if completion in globals() else 1.0


def raises(*_: Any) -> float:
    raise RuntimeError("no luck")


def exits(*_: Any) -> float:
    raise SystemExit(0)


def unprintable(*_: Any) -> float:
    class Odd(Exception):
        def __str__(self) -> str:
            raise ValueError

    raise Odd


def dies(*_: Any) -> float:
    os._exit(0)


def crashes(*_: Any) -> float:
    faulthandler.disable()  # pytest's would fill the screen
    return float(ctypes.string_at(0)[0])


def hangs(*_: Any) -> float:
    time.sleep(60)
    return 1.0


def starts_what_computes(*_: Any) -> float:
    return float(subprocess.run([sys.executable, "-S", "-c", "while True: pass"]).returncode)


def says_its_pid(completion: str, answer: str, metadata: dict[str, Any]) -> float:
    Path(answer).write_text(str(os.getpid()))
    return hangs()


def hangs_in_c(*_: Any) -> float:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    return float(bool(re.match(r"(a+)+$", "a" * 64 + "b")))


def grows(*_: Any) -> float:
    return float(len(bytearray(1 << 31)))


KEPT: list[bytearray] = []


def keeps(*_: Any) -> float:
    KEPT.append(bytearray(b"x" * (100 << 20)))
    return 1.0


def crashes_below_zero(*_: Any) -> float:
    return crashes()


crashes_below_zero.RANGE = (-math.inf, 0.0)  # type: ignore[attr-defined]


def leaves_an_alarm(*_: Any) -> float:
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    return 1.0


def leaves_a_child(completion: str, answer: str, metadata: dict[str, Any]) -> float:
    child = subprocess.Popen(["sleep", "60"])
    Path(answer).write_text(str(child.pid))
    return 1.0


def says_nan(*_: Any) -> float:
    return float("nan")


def says_inf(*_: Any) -> float:
    return float("inf")


def too_much(*_: Any) -> float:
    return 2.5


def text(*_: Any) -> Any:
    return "1.0"


def nothing(*_: Any) -> None:
    return None


NOT_CALLABLE = 3
