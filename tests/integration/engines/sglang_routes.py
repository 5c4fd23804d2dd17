"""Every route of a real SGLang server, and which ones need a key."""

from __future__ import annotations

import json
import re
import subprocess
from collections import defaultdict
from pathlib import Path

import httpx

from tests.kit.wait import WITHIN_S

from .servers import sglang_python

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


def answers(url: str, folder: Path) -> dict[tuple[str, str], list[str]]:
    """The calls, grouped by their answers without a key and with a wrong one. `folder`: an empty folder."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    with httpx.Client(base_url=url, timeout=WITHIN_S) as client:
        for method, path in _routes(folder):
            found[_answer(client, method, path, None), _answer(client, method, path, "wrong")].append(
                f"`{method} {path}`"
            )
    return found


def _routes(folder: Path) -> list[list[str]]:
    """[method, path] of every route of a server, including undocumented ones."""
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
