"""All of vLLM's routes need the key, but /health: its own check leaves out those that swap weights."""

from __future__ import annotations

import json
import os
import secrets
from typing import Any

KEY = "DVP_VLLM_KEY"
"""Environment variable with the key."""
OPEN = ("/health",)


class RequireKey:
    """ASGI middleware (--middleware)."""

    def __init__(self, app: Any) -> None:
        self._app, self._expected = app, f"Bearer {os.environ[KEY]}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(given, self._expected):
                body = json.dumps({"error": "this server needs a key"}).encode()
                headers = [(b"content-type", b"application/json")]
                await send({"type": "http.response.start", "status": 401, "headers": headers})
                await send({"type": "http.response.body", "body": body})
                return
        await self._app(scope, receive, send)
