"""Counts a service's answers for Prometheus."""

from __future__ import annotations

from prometheus_client import Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class CountedRequests:
    """ASGI middleware. `requests` counts answers by the labels route and status; a route is its path template, so that
    ids never become labels. `sent` counts the bytes of the bodies."""

    def __init__(self, app: ASGIApp, requests: Counter, sent: Counter | None = None) -> None:
        self._app = app
        self._requests = requests
        self._sent = sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "unmatched")
                self._requests.labels(route, message["status"]).inc()
            await send(message)
            if self._sent is not None:
                self._sent.inc(len(message.get("body", b"")))

        await self._app(scope, receive, counted if scope["type"] == "http" else send)
