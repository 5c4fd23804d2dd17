"""Inside a worker process: its pipes, and a guard around users' functions."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from dvp_rl.hooks import describe_error, readable
from dvp_rl.tether import end_with_parent

from .limits import Limits

T = TypeVar("T")

SLACK_S = 0.5
"""Time, in seconds, that a piece with a limit of its own has beyond it: for what ends it more gently than the alarm."""
MAX_TRACE = 16_384
"""Longest traceback sent to the program, in characters."""


class TimeLimitError(BaseException):
    """Raised by the alarm. Not an Exception, so that `except Exception` in a user's function does not catch it."""


class Failure(NamedTuple):
    """Why a piece of work has no result."""

    error: str
    trace: str = ""
    """Traceback, if there was an exception."""


class Pipes:
    """Messages from and to the program. Users' functions find nothing in stdin, and what they print goes to stderr."""

    def __init__(self) -> None:
        end_with_parent(signal.SIGKILL)  # also in code that never reads a pipe
        self._pid = os.getpid()
        self._requests, self._answers = os.dup(0), os.dup(1)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(2, 1)

    def send(self, message: Any) -> None:
        if os.getpid() != self._pid:
            os._exit(1)  # a fork of this process, which a user's function made and let return
        data = json.dumps(message).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._answers, data) :]
        except BrokenPipeError:
            raise SystemExit from None  # the program is gone

    def requests(self) -> Iterator[Any]:
        """Messages of the program until it closes the pipe."""
        with os.fdopen(self._requests, "rb") as lines:
            yield from map(json.loads, lines)


class Alarm:
    """A time limit enforced by SIGALRM. Code that never returns to the interpreter ignores it; the program then kills
    the process."""

    def __init__(self) -> None:
        self.limit_s = 0.0
        """Of one piece of the work that runs; 0 if there is none."""
        self.expired = False
        self._apart: list[None] = []
        """An entry per block of the work that is apart: there may be several at a time."""
        self._left_s = 0.0
        """What was left to the work when the first of them began, in seconds."""

    def _ring(self, signum: int, frame: FrameType | None) -> None:
        self.expired = True
        raise TimeLimitError

    def start(self, limit_s: float, pieces: int) -> None:
        """The work may take `pieces` times `limit_s` seconds."""
        self.limit_s, self._apart = limit_s, []
        self._set(limit_s * pieces)

    def stop(self) -> None:
        self._unset()
        self.limit_s, self._apart = 0.0, []

    def _set(self, limit_s: float) -> None:
        self.expired = False
        signal.signal(signal.SIGALRM, self._ring)  # every time: a user's function may have replaced it
        signal.setitimer(signal.ITIMER_REAL, limit_s)

    def _unset(self) -> float:
        """Returns the seconds that were left."""
        return signal.setitimer(signal.ITIMER_REAL, 0)[0]

    @contextmanager
    def apart(self) -> Iterator[None]:
        """The block has the time limit of one piece for itself; afterwards the time goes on that was left before it.
        Of several blocks at a time, the last one to begin sets the alarm. Nothing is limited if no work runs, nor in
        another thread, where no alarm rings."""
        if not self.limit_s or threading.current_thread() is not threading.main_thread():
            yield
            return
        apart = self._apart  # of this work: a task that it leaves behind may go on in the next one
        if not apart:
            self._left_s = self._unset()
        apart.append(None)
        self._set(self.limit_s + SLACK_S)
        try:
            yield
        finally:
            apart.pop()
            if apart is self._apart and not apart:
                self._set(max(self._left_s, SLACK_S))


alarm = Alarm()
"""There is one timer per process."""


class Guard:
    """Calls users' functions within limits."""

    def __init__(self, limits: Limits, callers: str) -> None:
        """`callers`: a file of the code that calls them. Tracebacks leave out what lies in its folder."""
        self._limits = limits
        self._callers = {Path(file).parent for file in (callers, __file__, asyncio.__file__)}

    def call(self, function: Callable[[], T], pieces: int = 1) -> T | Failure:
        """The function's result. It may take `pieces` times the time limit."""
        try:
            alarm.start(self._limits.timeout_s, pieces)
            try:
                result = function()
            finally:
                alarm.stop()
        except TimeLimitError as error:
            return Failure(self._limits.too_slow, self._trace_of(error))
        except MemoryError as error:
            return Failure(self._limits.too_large, self._trace_of(error))
        except BaseException as error:  # noqa: BLE001 - a user's function can raise anything
            return Failure(self._limits.too_slow if alarm.expired else describe_error(error), self._trace_of(error))
        return Failure(self._limits.too_slow) if alarm.expired else result

    def _trace_of(self, error: BaseException) -> str:
        """The traceback from the user's first frame on; of a long one, the beginning and the end."""
        frames = error.__traceback__
        while frames is not None and Path(frames.tb_frame.f_code.co_filename).parent in self._callers:
            frames = frames.tb_next
        trace = readable("".join(traceback.format_exception(type(error), error, frames)))
        half = MAX_TRACE // 2
        return trace if len(trace) <= MAX_TRACE else f"{trace[:half]}\n...\n{trace[-half:]}"


class Loop:
    """Runs users' coroutines, one at a time, in one event loop: clients and locks of a user's module are bound to
    it."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def finished(self, result: Any) -> Any:
        """The result of a coroutine, or the result itself."""
        if not inspect.isawaitable(result):
            return result

        async def awaited() -> Any:
            return await result

        try:
            return self._runner.run(awaited())
        except BaseException:
            self._cancel_rest()
            raise

    def _cancel_rest(self) -> None:
        """Ends what a failed call left running."""

        async def cancelled() -> None:
            rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

        self._runner.run(cancelled())

    def close(self) -> None:
        self._runner.close()


def limit_memory(memory_mib: int) -> None:
    """Limits memory beyond what the process holds already: threads of a numeric library may have reserved gigabytes.
    Linux only."""
    if sys.platform == "linux":
        (kib,) = re.findall(r"^VmData:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = (int(kib) << 10) + (memory_mib << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
