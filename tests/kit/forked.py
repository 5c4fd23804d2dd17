"""Our commands as real processes, forked from an interpreter that has imported everything: ten times faster to start.

A fresh interpreter needs five seconds of CPU to import torch and transformers, too much for hundreds of starts. A
forked process is like any other: it has its own session, environment and files, and runs `main`. tests/e2e starts
commands as users do.
"""

from __future__ import annotations

import importlib
import multiprocessing.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from unittest.mock import patch

from tests.kit.processes import FEW_THREADS, ROOT, end, environment
from tests.kit.wait import WITHIN_S

TRAINER = "dvp_trainer.__main__"
ROLLOUT = "dvp_rl.rollout.__main__"
HARNESS = "dvp_rl.harness.__main__"
MONITOR = "dvp_rl.monitor.__main__"

_lock = threading.Lock()
"""Held while starting processes and reading exit codes: of two concurrent readers, one would get a wrong code."""


class Service(ForkServerProcess):
    """`Service(TRAINER, ["config.toml"], log)` runs `main` of that module; it has the methods of subprocess.Popen."""

    def __init__(
        self,
        module: str,
        argv: Sequence[str],
        log: Path,
        *,
        errors: Path | None = None,
        before: Callable[[], object] | None = None,
        **variables: str,
    ) -> None:
        """The output is appended to `log`, standard error to `errors` if given. `before`, which must be picklable, is
        called first in the new process."""
        arguments = (module, tuple(argv), environment(**variables), log, errors or log, before)
        super().__init__(target=_become, args=arguments)
        with _lock:
            import_everything()
            self.start()

    def poll(self) -> int | None:
        """The exit code, or minus the signal that ended the process; None while it runs."""
        with _lock:
            return self.exitcode

    def wait(self, timeout: float = WITHIN_S) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        connection.wait([self.sentinel], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self.name, timeout)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        assert self.pid is not None
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended just now
                os.kill(self.pid, number)


@contextmanager
def service(module: str, argv: Sequence[str], log: Path, **variables: str) -> Iterator[Service]:
    """A service that ends with the block."""
    started = Service(module, argv, log, **variables)
    try:
        yield started
    finally:
        end(started)


def run(
    module: str, *argv: str, before: Callable[[], object] | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command that ends by itself."""
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder) / "out", Path(folder) / "errors"
        service = Service(module, argv, out, errors=errors, before=before, **variables)
        try:
            code = service.wait()
        finally:
            service.kill()
        return subprocess.CompletedProcess((module, *argv), code, out.read_text(), errors.read_text())


@contextmanager
def none_left() -> Iterator[None]:
    """Calls `end_all` at the end of the block."""
    try:
        yield
    finally:
        end_all()


def end_all() -> None:
    """Kills this process's running services and the processes they started."""
    with _lock:
        services = [process for process in multiprocessing.active_children() if isinstance(process, Service)]
    for service in services:
        assert service.pid, "started"
        with suppress(ProcessLookupError):  # it leads no process group before its first line
            os.killpg(service.pid, signal.SIGKILL)
        service.kill()


# Runs before multiprocessing's own finalizer, which would wait forever for a stopped process.
multiprocessing.util.Finalize(None, end_all, exitpriority=100)


@cache
def import_everything() -> None:
    """Starts the fork server."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.kit.preloaded"])
    with patch.dict(os.environ, FEW_THREADS, PYTHONPATH=str(ROOT)):
        forkserver.ensure_running()


def _become(
    module: str,
    argv: Sequence[str],
    variables: Mapping[str, str],
    out: Path,
    errors: Path,
    before: Callable[[], object] | None,
) -> None:
    os.setsid()
    os.chdir(ROOT)
    for descriptor, path in ((1, out), (2, errors)):
        with path.open("ab") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:0] = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = [module, *argv]
    if before is not None:
        before()
    importlib.import_module(module).main()
