"""Who is let in by every route of a real SGLang server, started as a replica starts it."""

from __future__ import annotations

import json
import re
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from uvicorn.config import WS_PROTOCOLS

from services.engines.sglang_launch import refuse_websockets
from tests.integration.http.table import check_table
from tests.kit.wait import WITHIN_S

from .sglang_process import SharedServer, sglang_python

ROUTES = """
import json
from sglang.srt.entrypoints.http_server import app

def flat(routes):
    for route in routes:
        inner = getattr(getattr(route, "original_router", None), "routes", None)
        yield from [route] if inner is None else flat(inner)

routes = [(route.path, getattr(route, "methods", ["WebSocket"])) for route in flat(app.routes)]
print(json.dumps([[method, path] for path, methods in routes for method in sorted(methods)]))
"""
UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "c29tZSBzaXh0ZWVuIGJ5dA==",
}
OPEN = {"`GET /health`", "`GET /health_generate`", "`GET /ready`"}
"""What answers without a key, and says no more than that the server runs."""


def _routes(folder: Path) -> list[list[str]]:
    """[method, path] of all that a server has, also of what its documentation keeps to itself."""
    command = [sglang_python(), "-c", ROUTES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, cwd=folder, check=True)
    routes: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
    return routes


def _answer(client: httpx.Client, method: str, path: str, key: str | None) -> str:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    if method == "WebSocket":
        method, headers = "GET", headers | UPGRADE
    with client.stream(method, re.sub(r"\{[^}]+\}", "x", path), headers=headers) as response:
        return str(response.status_code) if response.status_code in (401, 403) else "answered"


def test_websockets_are_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a library for them is installed, as here, a request for one would go past SGLang's keys."""

    def protocol() -> Any:
        config = uvicorn.Config(app=lambda: None)
        config.load()
        return config.ws_protocol_class

    monkeypatch.setitem(WS_PROTOCOLS, "auto", WS_PROTOCOLS["auto"])
    assert protocol() is not None
    refuse_websockets()
    assert protocol() is None


@pytest.mark.slow
def test_sglang_lets_nobody_in_without_its_keys(
    shared_server: SharedServer, folders: dict[str, Path], tmp_path: Path
) -> None:
    server = shared_server.remote(folders["even"])
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    with httpx.Client(base_url=server.url, timeout=WITHIN_S) as client:
        for method, path in _routes(tmp_path):
            answers = tuple(_answer(client, method, path, key) for key in (None, f"{server.admin_key}x"))
            found[answers].append(f"`{method} {path}`")
    assert sum(map(len, found.values())) > 100
    assert {call for answers, calls in found.items() if answers != ("401", "401") for call in calls} == OPEN
    rows = [(*answers, ", ".join(sorted(calls))) for answers, calls in sorted(found.items())]
    check_table("sglang", ("no key", "wrong key", "Calls"), rows)
