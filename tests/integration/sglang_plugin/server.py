"""A real SGLang server for tests, one at a time, because a start takes half a minute and two cores."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest

from tests.kit import processes
from tests.kit.ports import free_port
from tests.kit.wait import WITHIN_S, until

PYTHON = Path(__file__).parents[3] / ".sglang" / "bin" / "python"
API_KEY = "for tests"
FLAGS = (
    *("--api-key", API_KEY),
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--dtype", "float32"),
    *("--max-total-tokens", "65536", "--max-running-requests", "64", "--context-length", "1024"),
    *("--log-level", "warning", "--skip-server-warmup", "--sleep-on-idle"),
)
POLL_S, GRACE_S = 0.1, 2.0
"""Polling interval, and time for SGLang's helpers to unlink its shared memory, in seconds."""

Answer: TypeAlias = dict[str, Any]


class Server:
    """A `python -m sglang.launch_server`, started as the README describes."""

    def __init__(self, folder: Path, log: Path, flags: Sequence[str], environment: dict[str, str]) -> None:
        self.url, self._log = f"http://127.0.0.1:{free_port()}", log
        where = ("--model-path", str(folder), "--host", "127.0.0.1", "--port", self.url.rpartition(":")[2])
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [PYTHON, "-m", "sglang.launch_server", *where, *FLAGS, *flags],
                stdout=output,
                stderr=output,
                cwd=log.parent,
                env=processes.environment(**environment),
                start_new_session=True,
            )
        headers = {"Authorization": f"Bearer {API_KEY}"}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=WITHIN_S, trust_env=False)

    def wait_ready(self) -> None:
        try:
            until(self._is_ready, "SGLang is ready")
        except AssertionError:
            self.stop()
            pytest.fail(f"SGLang did not start:\n{self._log.read_text(errors='replace')[-3000:]}")

    def _is_ready(self) -> bool:
        assert self._process.poll() is None
        try:
            return self.http.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    def generate(self, prompts: Sequence[Sequence[int]], settings: Sequence[dict[str, Any]]) -> list[Answer]:
        """Sends one batch request: prompt i with settings i. With n > 1 the answers to a prompt are consecutive."""
        body = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": [{"ignore_eos": True, **setting} for setting in settings],
            "return_logprob": True,
        }
        return self.post("/generate", body)  # type: ignore[return-value]

    def post(self, path: str, body: dict[str, Any]) -> Answer | list[Answer]:
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        found: Answer | list[Answer] = response.json()
        return found

    def stream(self, body: dict[str, Any]) -> Iterator[Answer]:
        """Yields each chunk as it arrives: the answer to one prompt so far."""
        with self.http.stream("POST", "/generate", json=body | {"stream": True}) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))

    def stop(self) -> None:
        """Kills the server, which has nothing worth the wait after SIGTERM. Its processes end too, or are killed."""
        self.http.close()
        self._process.kill()
        self._process.wait()
        with suppress(ProcessLookupError):
            for _ in range(int(GRACE_S / POLL_S)):
                os.killpg(self._process.pid, 0)
                time.sleep(POLL_S)
            os.killpg(self._process.pid, signal.SIGKILL)


class Servers:
    """Keeps one server running; a request for a different one replaces it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._running, self._key = folder, None, None  # type: tuple[Path, Server | None, object]

    def get(self, model: Path, *flags: str, **environment: str) -> Server:
        key = (model, flags, tuple(environment.items()))
        if self._running is None or key != self._key:
            self.stop()
            self._running = Server(model, self._folder / "sglang.log", flags, environment)
            self._key = key
            self._running.wait_ready()
        return self._running

    def stop(self) -> None:
        if self._running is not None:
            self._running.stop()
        self._running = None
