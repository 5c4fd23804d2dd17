"""A reward that fails in the way that `completion` names. Imported by the pool's worker processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn


class NoTextError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


async def awaited(completion: str, answer: str | None, *, prompt: str, extra: dict[str, Any]) -> float:
    await asyncio.sleep(0)
    raise KeyError(completion)


def blind(completion: str, answer: str | None, *, prompt: str, extra: dict[str, Any]) -> float:
    return float(completion.split(" ") == answer)


def blind_trl(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    return [float(completion.split(" ") == right) for completion, right in zip(completions, answer, strict=True)]


def penalty(completion: str, answer: str | None, *, prompt: str, extra: dict[str, Any]) -> float:
    return -float(completion != answer)


def reward(completion: str, answer: str | None, *, prompt: str, extra: dict[str, Any]) -> Any:
    match completion:
        case "raise":
            raise KeyError("no such field\nsecond line")
        case "nan":
            return float("nan")
        case "none":
            return None
        case "text":
            return "1.0"
        case "sleep":
            wait_for_ever()
        case "swallow":  # swallows the alarm and continues
            with contextlib.suppress(BaseException):
                wait_for_ever()
            return 1.0
        case "deaf":  # like C code that never returns to the interpreter
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
            if "mark" in extra:
                Path(extra["mark"]).touch()
            wait_for_ever()
        case "hoard":  # never written to, so that a machine without the limit survives the test
            return float(len(bytearray(4 << 30)))
        case "exit":
            os._exit(3)
        case "sys.exit":
            sys.exit(4)
        case "cancelled":
            raise asyncio.CancelledError
        case "no text":
            raise NoTextError
        case "long":
            raise ValueError("x" * 100_000)
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "deaf parent":  # hangs with a child process that would outlive it
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            with open(extra["pid_file"], "w") as file:
                file.write(str(child.pid))
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
            wait_for_ever()
        case "print":
            print("noise on stdout")  # noqa: T201
            return float(sys.stdin.read() == "")
        case "pid":
            return os.getpid()
        case "modules":
            return float("torch" in sys.modules or "transformers" in sys.modules)
        case "columns":
            return extra == {"number": 5, "share": 0.5, "many": [0, 1, 2], "when": "2026-01-02"}
        case "echo":
            return float(answer or 0) + len(prompt) + extra["more"]
    return 0.25


def group(completions: list[str], **kwargs: Any) -> list[Any]:
    """TRL's form: every completion is scored by `reward`, so a bad one costs its group."""
    return [reward(completion, None, prompt="", extra=kwargs) for completion in completions]


def standardised(completions: list[str], **kwargs: Any) -> list[float]:
    """A reward that compares the completions of a group."""
    lengths = [len(completion) for completion in completions]
    mean, deviation = statistics.mean(lengths), statistics.stdev(lengths)
    return [(length - mean) / deviation for length in lengths]


def heldout_only(completion: str, answer: str | None, *, prompt: str, extra: dict[str, Any]) -> float:
    return {"heldout": 1.0}[prompt]


def wait_for_ever() -> NoReturn:
    while True:
        time.sleep(0.01)
