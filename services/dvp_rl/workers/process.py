"""One worker process, as the program sees it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from typing import Any

from dvp_rl.contract.errors import ConfigError

from .limits import Limits

START_TIMEOUT_S = 120.0
GRACE_S = 1.0
"""Extra time beyond the time limit before a worker is killed, in seconds."""
LAST_LOOK_S = 0.2
"""Time for a last read of the pipe after that, in seconds: this event loop itself may have been blocked until then."""
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
        self._unread = b""

    async def start(self) -> Any:
        """Returns the first message, an object. Raises ConfigError if that has an `error`, or does not come."""
        # A separate session: Ctrl-C at the terminal reaches only the program, and a kill includes grandchildren.
        self._process = await asyncio.create_subprocess_exec(
            *self._command, json.dumps(sys.path), self._arguments, stdin=PIPE, stdout=PIPE, start_new_session=True
        )
        self._unread = b""
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
        assert self._process is not None
        assert self._process.stdout is not None
        for patience in (timeout_s, LAST_LOOK_S):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    data = await self._process.stdout.read(READ_BYTES)
                if not data:
                    raise WorkerLostError(await self._how_it_ended())
                return data
        raise WorkerLostError(f"{self._limits.too_slow} and had to be killed")

    async def _how_it_ended(self) -> str:
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                code = await self._process.wait()
            return f"its process ended {f'by {signal.Signals(-code).name}' if code < 0 else f'with exit status {code}'}"
        return "its process closed its pipe"

    async def stop(self) -> None:
        """Kills the process and everything it started."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:  # otherwise its pid may belong to another process
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()
