"""One worker process, as the program sees it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from functools import partial
from typing import Any

from dvp_rl.contract.errors import ConfigError

from .limits import Limits

START_TIMEOUT_S = 120.0
GRACE_S = 1.0
"""Extra time beyond the time limit before a worker is killed, in seconds."""
KILL_S = 10.0
"""Longest wait for the end of a process that was killed, in seconds."""
LAST_LOOK_S = 0.2
"""Time for a last read of the pipe after that, in seconds: this event loop itself may have been blocked until then."""
LOOK_S = 1.0
"""Time between two looks at whether a silent process is alive, in seconds."""
READ_BYTES = 1 << 16

# Uses -P and the parent's sys.path: `-m` would put the working directory first, and a user's math.py would shadow
# Python's.
BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {module} import main; main(*json.loads(sys.argv[2]))"
)


class WorkerLostError(Exception):
    """The worker process died or stopped responding."""


class WorkerProcess:
    """A fresh interpreter that imports neither torch nor the program's main module, connected by a pair of pipes that
    carry JSON lines. It can be started again after its end."""

    def __init__(self, module: str, setting: str, name: str, limits: Limits) -> None:
        """`module`: runs in it, by its function main(name, limits), which answers through child.Pipes. `setting`: whose
        value is `name`, a user's function."""
        self._what = f"{setting} {name!r}"
        self._command = (sys.executable, "-P", "-c", BOOTSTRAP.format(module=module))
        self._arguments, self._limits = json.dumps((name, limits)), limits
        self._process: Process | None = None
        self._pipe: asyncio.BaseTransport | None = None
        self._answers: asyncio.StreamReader | None = None
        self._unread = b""

    async def start(self) -> Any:
        """Returns the first message, an object. Raises ConfigError if that has an `error`, or does not come."""
        # A pipe of our own: asyncio would take a process for running while one that it forked holds its stdout.
        ours, theirs = os.pipe()
        try:
            self._answers, self._unread = asyncio.StreamReader(), b""
            self._pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
                partial(asyncio.StreamReaderProtocol, self._answers), os.fdopen(ours, "rb")
            )
            # A separate session: Ctrl-C at the terminal reaches only the program, and a kill includes grandchildren.
            self._process = await asyncio.create_subprocess_exec(
                *self._command, json.dumps(sys.path), self._arguments, stdin=PIPE, stdout=theirs, start_new_session=True
            )
        finally:
            os.close(theirs)
        try:
            (hello, *_) = await self.receive(START_TIMEOUT_S)
        except WorkerLostError as error:
            raise ConfigError(f"{self._what}: its worker process did not start: {error}") from None
        if "error" in hello:
            raise ConfigError(hello["error"])
        return hello

    def is_alive(self) -> bool:
        """Asks the kernel where possible: asyncio notices a death a moment later, which would cost a piece of work."""
        if self._process is None or self._process.returncode is not None:
            return False
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return True
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            return False

    def send(self, message: bytes) -> None:
        """`message`: a line of JSON without its end."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(message + b"\n")

    async def receive(self, limit_s: float) -> list[Any]:
        """One or more messages. Raises WorkerLostError, also if the worker is silent for longer than it may work."""
        lines: list[bytes] = []
        while not lines:
            *lines, self._unread = (self._unread + await self._read(limit_s + GRACE_S)).split(b"\n")
        return [json.loads(line) for line in lines]

    async def _read(self, timeout_s: float) -> bytes:
        assert self._answers is not None
        clock = asyncio.get_running_loop().time
        end = clock() + timeout_s
        while True:
            left_s = min(LOOK_S, end - clock())
            is_last = left_s <= 0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_LOOK_S if is_last else left_s):
                    if data := await self._answers.read(READ_BYTES):
                        return data
                raise WorkerLostError(await self._how_it_ended())
            is_alive = self.is_alive()
            if is_last:
                raise WorkerLostError(
                    f"{self._limits.too_slow} and had to be killed" if is_alive else await self._how_it_ended()
                )
            if not is_alive:  # although a process that it forked holds its pipe
                end = clock()

    async def _how_it_ended(self) -> str:
        process = self._process
        assert process is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                while process.returncode is None:  # noqa: ASYNC110 - `wait` would wait for the pipes, too
                    await asyncio.sleep(0.01)
        code = process.returncode
        if code is None:
            return "its process closed its pipe"
        _kill_group(process)
        return f"its process ended {f'by {signal.Signals(-code).name}' if code < 0 else f'with exit status {code}'}"

    async def stop(self) -> None:
        """Kills the process and everything it started."""
        process, self._process = self._process, None
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.close()
        if process is None:
            return
        if process.returncode is None:  # otherwise its pid may belong to another process
            _kill_group(process)
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(TimeoutError):  # its pipe may be held by a process that left its group
            async with asyncio.timeout(KILL_S):
                await process.wait()


def _kill_group(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
