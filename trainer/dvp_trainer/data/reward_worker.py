"""The process in which reward functions run: one JSON line in per chunk, one JSON line out per sample.

Started by reward_pool.py in a fresh interpreter that imports neither torch nor the trainer's main module. Output of a
reward function to stdout is redirected to stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from dvp_rl.contract.errors import ConfigError
from dvp_rl.hooks import describe_error

from .rewards import Reward, as_number, resolve_reward

PR_SET_PDEATHSIG = 1
MEMORY_LIMIT = "needed more memory than reward.memory_mib allows"


class TimeLimitError(BaseException):
    """Raised by the alarm. Not an Exception, so that `except Exception` in a reward function does not catch it."""


class Alarm:
    """A time limit enforced by SIGALRM. Code that never returns to the interpreter ignores it; the pool then kills the
    process."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.expired = False

    def _ring(self, signum: int, frame: FrameType | None) -> None:
        self.expired = True
        raise TimeLimitError

    def start(self) -> None:
        self.expired = False
        signal.signal(signal.SIGALRM, self._ring)  # every time: a reward function may have replaced it
        signal.setitimer(signal.ITIMER_REAL, self._limit_s)

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)


def score(reward: Reward, alarm: Alarm, request: list[Any]) -> tuple[float | None, str | None]:
    """(reward, None), or (None, error) if the function failed."""
    completion, answer, prompt, extra = request
    try:
        alarm.start()
        try:
            value = as_number(reward(completion, answer, prompt=prompt, extra=extra))
        finally:
            alarm.stop()
    except TimeLimitError:
        return None, TIME_LIMIT
    except MemoryError:
        return None, MEMORY_LIMIT
    except Exception as error:  # noqa: BLE001 - a user's function can raise anything
        return None, TIME_LIMIT if alarm.expired else describe_error(error)
    return (None, TIME_LIMIT) if alarm.expired else (value, None)


TIME_LIMIT = "took longer than the time limit"


def _private_pipes() -> tuple[int, int]:
    """Moves the pipes from file descriptors 0 and 1, so that reward functions cannot read or write them by accident."""
    requests, results = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    return requests, results


def _end_with_the_trainer() -> None:
    """Makes the kernel kill this process when the trainer ends, even in code that never reads a pipe. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _limit_memory(memory_mib: int) -> None:
    """Limits memory beyond what the process holds already: threads of a numeric library may have reserved gigabytes.
    Linux only."""
    if sys.platform == "linux":
        (kib,) = re.findall(r"^VmData:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = (int(kib) << 10) + (memory_mib << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def main(name: str, limit_s: float, memory_mib: int) -> None:
    _end_with_the_trainer()
    requests, results = _private_pipes()

    def send(message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        try:
            while data:
                data = data[os.write(results, data) :]
        except BrokenPipeError:
            raise SystemExit from None  # the trainer is gone

    try:
        reward = resolve_reward(name)
    except ConfigError as refusal:
        return send({"error": str(refusal)})
    _limit_memory(memory_mib)
    send({"ready": os.getpid()})
    alarm = Alarm(limit_s)
    with os.fdopen(requests, "rb") as lines:
        for line in lines:
            for request in json.loads(line):
                start = time.perf_counter()
                value, error = score(reward, alarm, request)
                send((value, error, time.perf_counter() - start))
    return None
