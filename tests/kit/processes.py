"""Real processes started by a test, and real servers on a thread of the test process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from tests.kit.wait import WITHIN_S

ROOT = Path(__file__).parents[2]
PYTHON = (sys.executable, "-m")
HEEDED_WITHIN_S = 60.0
"""Time a child has to end after SIGTERM before it is killed, in seconds."""

FEW_THREADS = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
"""Environment variables of every process in a test, because several run at once."""

Serve = Callable[[asyncio.Event], Awaitable[None]]


class Child(Protocol):
    """A process started by a test."""

    def poll(self) -> int | None: ...
    def wait(self, timeout: float) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without DVP_ settings, offline, and with one thread per library."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DVP_")}
    return {**kept, **FEW_THREADS, **variables}


def run(
    command: Sequence[str | Path], timeout_s: float = WITHIN_S, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command that ends by itself."""
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@contextmanager
def process(command: Sequence[str | Path], log: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block."""
    child = start(command, log, **variables)
    try:
        yield child
    finally:
        end(child)


def start(command: Sequence[str | Path], log: Path, **variables: str) -> subprocess.Popen[bytes]:
    """Starts a process whose output is appended to `log`."""
    with log.open("ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT, env=environment(**variables))


def end(child: Child) -> None:
    """Sends SIGTERM, then SIGKILL if the child does not end."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(HEEDED_WITHIN_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(HEEDED_WITHIN_S)


class ServerThread:
    """Runs `serve` on its own event loop in a thread of this process; starts ten times faster than a process."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._asked_to_stop = asyncio.Event()
        self._has_loop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server")
        self._thread.start()
        self._has_loop.wait(WITHIN_S)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Stops the server; no-op if it has ended."""
        if self.running:
            self._loop.call_soon_threadsafe(self._asked_to_stop.set)
        self._thread.join(WITHIN_S)
        assert not self.running, "the server did not stop"

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            self._has_loop.set()
            runner.run(self._serve(self._asked_to_stop))  # type: ignore[arg-type]
