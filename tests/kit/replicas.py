"""Real replicas for tests: a `dvp-rollout` process, or the same server in a thread."""

from __future__ import annotations

import re
import subprocess
from functools import partial
from pathlib import Path
from signal import SIGTERM, Signals
from typing import Self, TypedDict, Unpack

import httpx

from dvp_rl.client import Client, Retry
from dvp_rl.logs import LogContext
from dvp_rl.rollout.server import serve
from dvp_rl.rollout.settings import RolloutSettings
from tests.kit import web
from tests.kit.forked import ROLLOUT, Service
from tests.kit.processes import PYTHON, ServerThread
from tests.kit.wait import WITHIN_S, until

COMMAND = (*PYTHON, "dvp_rl.rollout")


class Options(TypedDict, total=False):
    """Options of a replica in a test, besides its command line."""

    token: str | None
    wait_ready: bool


class _Replica:
    """Base of both kinds of replica. `folder` holds the port file."""

    def __init__(self, folder: Path, *args: str, token: str | None = None, wait_ready: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._port_file = folder / "port"
        self._args = ["--port", "0", "--port-file", str(self._port_file), *args]
        self._token = token
        self._wait_path = "/readyz" if wait_ready else "/healthz"
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> Client:
        return Client(self.url, token=self._token, timeout=WITHIN_S, retry=Retry(tries=1))

    def in_flight(self) -> float:
        """Samples that generate or wait."""
        (number,) = self._metric("in_flight_samples").values()
        return number

    def prompt_tokens(self) -> dict[str, float]:
        """Tokens of all prompts so far: how many the model `read`, and how many were `cached`."""
        return self._metric("prompt_tokens_total")

    def session_turns(self) -> dict[str, float]:
        """Those that it has drawn, by why they opened another branch."""
        return self._metric("session_turns_total")

    def _metric(self, name: str) -> dict[str, float]:
        """Values by the value of their label, if any."""
        text = web.get(f"{self.url}/metrics", auth=self._token and ("", self._token)).text
        found = re.findall(rf'^dvp_rollout_{name}(?:\{{\w+="(.*)"\}})? (\S+)$', text, re.M)
        return {label: float(value) for label, value in found}

    def stop(self) -> object:
        raise NotImplementedError

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _running(self) -> bool:
        raise NotImplementedError

    def _wait(self) -> None:
        try:
            until(self._answers, "the replica answers")
        except BaseException:
            self.stop()
            raise

    def _answers(self) -> bool:
        assert self._running(), "the replica ended at start"
        if not self._port_file.exists():
            return False
        self.port = int(self._port_file.read_text())
        try:
            return web.get(self.url + self._wait_path).status_code == 200
        except httpx.TransportError:
            return False


class ReplicaProcess(_Replica):
    """`with ReplicaProcess(folder, "--model", ...) as replica:` waits until it is ready, and ends it with the block."""

    def __init__(
        self, folder: Path, *args: str, variables: dict[str, str] | None = None, **options: Unpack[Options]
    ) -> None:
        super().__init__(folder, *args, **options)
        self._variables = variables or {}
        self._log = folder / "log"
        self.pid = 0

    @property
    def log(self) -> str:
        return self._log.read_text()

    def stop(self, how: Signals = SIGTERM) -> int:
        """Stops the replica; returns its exit code."""
        if self._running():
            self._process.send_signal(how)
        try:
            return self._process.wait(WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise

    def _running(self) -> bool:
        return self._process.poll() is None

    def __enter__(self) -> Self:
        self._log.write_text("")
        self._process = Service(ROLLOUT, self._args, self._log, **self._variables)
        assert self._process.pid, "started"
        self.pid = self._process.pid
        self._wait()
        return self


class ReplicaThread(_Replica):
    """A replica in a thread; use it with `--engine fake`."""

    def stop(self) -> None:
        self._server.stop()

    def _running(self) -> bool:
        return self._server.running

    def __enter__(self) -> Self:
        settings = RolloutSettings.load(self._args)
        self._server = ServerThread(partial(serve, settings, LogContext()))
        self._wait()
        return self
