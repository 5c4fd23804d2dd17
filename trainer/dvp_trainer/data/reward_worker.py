"""The process in which reward functions run: one JSON line in per chunk of requests, one JSON line out per request.

Started by reward_pool.py in a fresh interpreter that imports neither torch nor the trainer's main module. Output of a
reward function to stdout is redirected to stderr.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import sys
import time
import traceback
from asyncio import CancelledError
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from dvp_rl.contract.errors import ConfigError
from dvp_rl.hooks import describe_error
from dvp_rl.tether import end_with_parent

from .reward_forms import Request, RewardFunction
from .rewards import as_number, resolve_reward

TIME_LIMIT = "took longer than reward.timeout_s allows"
MEMORY_LIMIT = "needed more memory than reward.memory_mib allows"
MAX_TRACE = 16_384
"""Longest traceback sent to the trainer, in characters."""
CALLERS = {Path(__file__).parent, Path(asyncio.__file__).parent}
"""Folders of the code that calls a user's function."""


class TimeLimitError(BaseException):
    """Raised by the alarm. Not an Exception, so that `except Exception` in a reward function does not catch it."""


class Alarm:
    """A time limit enforced by SIGALRM. Code that never returns to the interpreter ignores it; the pool then kills the
    process."""

    def __init__(self) -> None:
        self.expired = False

    def _ring(self, signum: int, frame: FrameType | None) -> None:
        self.expired = True
        raise TimeLimitError

    def start(self, limit_s: float) -> None:
        self.expired = False
        signal.signal(signal.SIGALRM, self._ring)  # every time: a reward function may have replaced it
        signal.setitimer(signal.ITIMER_REAL, limit_s)

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)


class Outcome(NamedTuple):
    """What became of one completion."""

    value: float | None
    """Finite reward; None if the function failed."""
    error: str | None = None
    trace: str = ""
    """Traceback of the failure."""


def score(reward: RewardFunction, alarm: Alarm, request: Request, limit_s: float) -> list[Outcome]:
    """One outcome per completion. `limit_s` is the time limit for all of them together."""
    num = len(request["completions"])
    try:
        alarm.start(limit_s)
        try:
            values = reward(request)
        finally:
            alarm.stop()
    except TimeLimitError as error:
        return [Outcome(None, TIME_LIMIT, trace_of(error))] * num
    except MemoryError as error:
        return [Outcome(None, MEMORY_LIMIT, trace_of(error))] * num
    except (Exception, SystemExit, CancelledError) as error:  # noqa: BLE001 - a user's function can raise anything
        message = TIME_LIMIT if alarm.expired else describe_error(error)
        return [Outcome(None, message, trace_of(error))] * num
    return [Outcome(None, TIME_LIMIT)] * num if alarm.expired else [_checked(value) for value in values]


def _checked(value: Any) -> Outcome:
    try:
        return Outcome(as_number(value))
    except Exception as error:  # noqa: BLE001 - a user's type can raise anything, too
        return Outcome(None, describe_error(error), trace_of(error))


def trace_of(error: BaseException) -> str:
    """The traceback from the user's first frame on; of a long one, the beginning and the end."""
    frames = error.__traceback__
    while frames is not None and Path(frames.tb_frame.f_code.co_filename).parent in CALLERS:
        frames = frames.tb_next
    trace = "".join(traceback.format_exception(type(error), error, frames))
    half = MAX_TRACE // 2
    return trace if len(trace) <= MAX_TRACE else f"{trace[:half]}\n...\n{trace[-half:]}"


def _private_pipes() -> tuple[int, int]:
    """Moves the pipes from file descriptors 0 and 1, so that reward functions cannot read or write them by accident."""
    requests, results = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    return requests, results


def _limit_memory(memory_mib: int) -> None:
    """Limits memory beyond what the process holds already: threads of a numeric library may have reserved gigabytes.
    Linux only."""
    if sys.platform == "linux":
        (kib,) = re.findall(r"^VmData:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = (int(kib) << 10) + (memory_mib << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def main(name: str, limit_s: float, memory_mib: int) -> None:
    end_with_parent(signal.SIGKILL)  # also in code that never reads a pipe
    requests, results = _private_pipes()

    def send(message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        try:
            while data:
                data = data[os.write(results, data) :]
        except BrokenPipeError:
            raise SystemExit from None  # the trainer is gone

    try:
        reward = RewardFunction(name, resolve_reward(name))
    except ConfigError as refusal:
        return send({"error": str(refusal)})
    _limit_memory(memory_mib)
    send({"form": reward.form})
    alarm = Alarm()
    with os.fdopen(requests, "rb") as lines:
        for line in lines:
            for request in json.loads(line):
                start = time.perf_counter()
                outcomes = score(reward, alarm, request, limit_s * len(request["completions"]))
                send((outcomes, time.perf_counter() - start))
    return None
