"""Child processes that end together: leaving the fleet ends all of them, and so does the end of their launcher."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dvp_rl.tether import tethered

GRACE_S = 10.0
"""Grace period between SIGTERM and SIGKILL, in seconds."""
LAST_LINES = 15
TORCHRUN = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|OMP_NUM_THREADS|TORCHELASTIC_\w+"
)
"""Variables by which torchrun tells a launcher its place; a child would take it for its own."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def was_killed(self) -> bool:
        """By a signal, once it has ended."""
        return self.process.returncode < 0

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
        """`logs`: folder for the children's output, which exists."""
        self._logs = logs
        self._children: dict[str, Child] = {}

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> Child:
        """Starts a child, or starts one that has ended again. Its output is appended to its log."""
        log = self._logs / f"{name}.log"
        with log.open("ab") as file:
            process = subprocess.Popen(
                tethered(command),
                env={name: value for name, value in os.environ.items() if not TORCHRUN.fullmatch(name)} | dict(env),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        child = Child(name, process, log)
        if earlier := self._children.get(name):
            _end_group(earlier)
        self._children[name] = child
        return child

    def stop(self) -> None:
        """Sends SIGTERM to each child, and SIGKILL after GRACE_S to all that is left of their process groups.
        STOP_SIGNALS are ignored meanwhile."""
        with undisturbed():
            running = [child.process for child in self._children.values() if not child.has_ended()]
            for process in running:
                process.terminate()
            deadline = time.monotonic() + GRACE_S
            for process in running:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
            for child in self._children.values():
                _end_group(child)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _end_group(child: Child) -> None:
    """Kills what is left of the child's process group, which outlives its leader while one of its workers runs."""
    with suppress(ProcessLookupError):
        os.killpg(child.process.pid, signal.SIGKILL)
    child.process.wait()


def undisturbed() -> AbstractContextManager[None]:
    """Ignores STOP_SIGNALS during the block."""
    return _handling(STOP_SIGNALS, signal.SIG_IGN)


def interruptible() -> AbstractContextManager[None]:
    """Makes SIGTERM and SIGHUP raise KeyboardInterrupt, like Ctrl-C, so that all of them end the block the same way. An
    ignored one (nohup) stays ignored."""
    heard = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    return _handling(heard, signal.default_int_handler)


@contextmanager
def _handling(numbers: Sequence[signal.Signals], handler: Any) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
