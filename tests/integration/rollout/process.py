"""Real replicas for tests: a `dvp-rollout` process, and the same server in a thread, which starts ten times faster."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypedDict, Unpack

import httpx

from services.client import Client, Retry
from services.logs import LogContext
from services.rollout.server import serve
from services.rollout.settings import RolloutSettings

START_TIMEOUT_S = 60.0
WAIT_S = 20.0
COMMAND = [sys.executable, "-m", "services.rollout"]


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without settings that happen to be in it, and with one thread per library."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DVP_")}
    return {**kept, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **variables}


def run(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """One that is expected to end by itself."""
    return subprocess.run(
        [*COMMAND, *args], env=environment(**variables), capture_output=True, text=True, timeout=START_TIMEOUT_S
    )


def until(condition: Callable[[], bool], timeout: float = WAIT_S) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.02)


class Options(TypedDict, total=False):
    """Of a replica in a test, beside its command line."""

    token: str | None
    wait_ready: bool
    start_timeout: float


class _Replica:
    """What both have in common. `folder` takes the port file."""

    def __init__(
        self,
        folder: Path,
        *args: str,
        token: str | None = None,
        wait_ready: bool = True,
        start_timeout: float = START_TIMEOUT_S,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._port_file = folder / "port"
        self._args = ["--port", "0", "--port-file", str(self._port_file), *args]
        self._token = token
        self._start_timeout = start_timeout
        self._wait_path = "/readyz" if wait_ready else "/healthz"
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> Client:
        return Client(self.url, token=self._token, timeout=20.0, retry=Retry(tries=1))

    def _running(self) -> bool:
        raise NotImplementedError

    def _answers(self) -> bool:
        assert self._running(), "the replica ended at start"
        if not self._port_file.exists():
            return False
        self.port = int(self._port_file.read_text())
        return httpx.get(self.url + self._wait_path, timeout=10).status_code == 200


class ReplicaProcess(_Replica):
    """`with ReplicaProcess(folder, "--model", ...) as replica:` returns when it is ready; ends the process after."""

    def __init__(
        self, folder: Path, *args: str, variables: dict[str, str] | None = None, **options: Unpack[Options]
    ) -> None:
        super().__init__(folder, *args, **options)
        self._environment = environment(**(variables or {}))
        self.pid = 0
        self._log = folder / "log"

    @property
    def log(self) -> str:
        return self._log.read_text()

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        if self._running():
            self._process.send_signal(how)
        return self._process.wait(timeout=WAIT_S)

    def _running(self) -> bool:
        return self._process.poll() is None

    def __enter__(self) -> Self:
        with self._log.open("w") as log:
            self._process = subprocess.Popen([*COMMAND, *self._args], env=self._environment, stderr=log)
        self.pid = self._process.pid
        try:
            until(self._answers, self._start_timeout)
        except BaseException:
            self._process.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise


class ReplicaThread(_Replica):
    """The same, with the server's event loop in a thread of this process. Give it `--engine fake`."""

    def stop(self) -> None:
        if self._running():
            self._loop.call_soon_threadsafe(self._asked_to_stop.set)
        self._thread.join(WAIT_S)
        assert not self._running(), "the replica did not stop"

    def _running(self) -> bool:
        return self._thread.is_alive()

    def _serve(self, settings: RolloutSettings) -> None:
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            runner.run(serve(settings, LogContext(), self._asked_to_stop))

    def __enter__(self) -> Self:
        self._asked_to_stop = asyncio.Event()
        settings = RolloutSettings.load(self._args)
        self._thread = threading.Thread(target=self._serve, args=(settings,), name="replica")
        self._thread.start()
        try:
            until(self._answers, self._start_timeout)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
