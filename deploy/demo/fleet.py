"""Child processes that end together: an unexpected death of one ends all of them, as does leaving the fleet."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from dvp_rl.contract.errors import UnavailableError

POLL_S = 0.1
GRACE_S = 5.0
"""Grace period between SIGTERM and SIGKILL, in seconds."""
LAST_LINES = 15
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def obituary(self) -> str:
        """How the process ended, and the last lines of its log."""
        code = self.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        lines = self.log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        return "\n".join([f"{self.name} {how}. The end of {self.log}:", *(f"  {line}" for line in lines)])


class Fleet:
    """Context manager that stops its children. Each has its own session, so that Ctrl-C reaches only the launcher,
    which then stops them properly."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: list[Child] = []
        self._awaited: list[Child] = []

    def start(
        self, name: str, command: Sequence[str], *, cwd: Path, env: Mapping[str, str], show: bool = False
    ) -> Child:
        """Starts a child. `show` sends its standard output to the launcher's own instead of the log."""
        log = self._logs / f"{name}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                cwd=cwd,
                env=os.environ | env,
                stdin=subprocess.DEVNULL,
                stdout=None if show else file,
                stderr=file,
                start_new_session=True,
            )
        child = Child(name, process, log)
        self._children.append(child)
        return child

    def wait_for(self, child: Child, timeout_s: float) -> None:
        """Waits until `child` ends. Raises UnavailableError if it fails, and in the cases of `wait_until`."""
        self._awaited.append(child)
        self.wait_until(lambda: child.process.poll() is not None, f"{child.name} has ended", timeout_s)
        if child.process.returncode != 0:
            raise UnavailableError(child.obituary())

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Polls `condition`. Raises UnavailableError after `timeout_s`, or if a child ends that nobody waits for."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            for child in self._children:
                if child not in self._awaited and child.process.poll() is not None:
                    raise UnavailableError(child.obituary())
            if time.monotonic() > deadline:
                raise UnavailableError(f"timed out after {timeout_s:g} s waiting until {what}; see {self._logs}")
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Sends SIGTERM to each child, and SIGKILL after GRACE_S to all that is left of their process groups.
        STOP_SIGNALS are ignored meanwhile."""
        with undisturbed():
            running = [child.process for child in self._children if child.process.poll() is None]
            for process in running:
                process.terminate()
            deadline = time.monotonic() + GRACE_S
            for process in running:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
            for child in self._children:
                # The process group outlives its leader while one of the leader's workers still runs.
                with suppress(ProcessLookupError):
                    os.killpg(child.process.pid, signal.SIGKILL)
                child.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignores STOP_SIGNALS during the block."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interruptible() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise KeyboardInterrupt, like Ctrl-C, so that all of them end the block the same way."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
