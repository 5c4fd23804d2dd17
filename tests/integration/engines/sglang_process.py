"""One SGLang server for all tests of a session, whatever their event loops."""

from __future__ import annotations

import asyncio
import json
import platform
import sys
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from dvp_rl.engines.server import LocalServer
from dvp_rl.engines.sglang_server import CHECKOUT_PYTHON, Launch, Remote
from tests.kit.wait import WITHIN_S

CONTEXT = 1024


def sglang_python() -> Path:
    """The interpreter of `make sglang-cpu`. Fails the test if it could have been built but was not."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip(f"SGLang has no wheel for {sys.platform} on {platform.machine()}")
    if not CHECKOUT_PYTHON.exists():
        pytest.fail(f"no SGLang environment at {CHECKOUT_PYTHON}: run make sglang-cpu")
    return CHECKOUT_PYTHON


class SharedServer:
    """Serves models of one architecture at a time; another architecture replaces the process."""

    def __init__(self) -> None:
        self._architecture = ""
        self._server: LocalServer | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="shared-sglang", daemon=True)
        self._thread.start()

    def remote(self, folder: Path) -> Remote:
        """A server that can load `folder`, or other weights of its architecture."""
        config = json.loads((folder / "config.json").read_text())
        architecture = f"{config['architectures']} {config['tie_word_embeddings']}"
        if architecture != self._architecture:
            self.stop()
            self._server = LocalServer(Launch(python=sglang_python(), threads=1, max_batch=16), CONTEXT)
            self._run(self._server.start(folder, "unknown"))
            self._architecture = architecture
        assert self._server is not None
        client = self._server.client
        return Remote(client.url, client.api_key, admin_key=client.admin_key)

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
