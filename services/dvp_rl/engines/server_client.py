"""HTTP calls to an inference server. Every wait is bounded; every failure is a DvpError."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar

import httpx
from pydantic_core import from_json

from dvp_rl.cancellation import finished, shielded
from dvp_rl.contract.errors import ConfigError, EngineError, RequestError, UnavailableError

GENERATE_S = 24 * 3600.0
"""Longest wait for one answer, in seconds. Callers have shorter limits, and the wait ends if the server does."""
CALL_S = 60.0
READY_S = 5.0
IDLE_S = 2.0
"""Lifetime of an idle connection, in seconds: short, because one that the server closes would look like its death."""
HEALTH_S = 30.0
ABORTS_AT_ONCE = 32
MAX_REASON_CHARS = 500


class ServerClient(ABC):
    """One server. Raises UnavailableError if it is down, RequestError, EngineError, or ConfigError for a wrong key."""

    TITLE: ClassVar[str]
    """Name of the server's program, for messages."""
    KEYS: ClassVar[str]
    """The settings that hold its keys, for messages."""

    def __init__(self, url: str, *, api_key: str = "", admin_key: str = "") -> None:
        self.url = url
        self.api_key = api_key
        self.admin_key = admin_key
        self._admin = _bearer(admin_key or api_key)
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=_bearer(api_key),
            timeout=httpx.Timeout(CALL_S, connect=READY_S, pool=GENERATE_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=IDLE_S),
            trust_env=False,
        )

    @abstractmethod
    async def is_ready(self) -> bool:
        """Whether the server accepts requests, which does not mean that it answers them."""

    @abstractmethod
    async def is_healthy(self) -> bool:
        """Whether the server can generate now."""

    @abstractmethod
    async def pause(self) -> None:
        """Pauses generation; requests in flight continue after `resume`."""

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def load(self, folder: Path, version: str, timeout_s: float) -> str:
        """Loads a folder into a paused server and empties its cache. Returns why it was refused, or ""."""

    @abstractmethod
    async def flush(self) -> None:
        """Empties the cache; requests in flight compute theirs again."""

    @abstractmethod
    async def abort(self, request_ids: Sequence[str]) -> None: ...

    async def close(self) -> None:
        await finished(self._http.aclose())

    async def _is_ok(self, path: str, timeout_s: float) -> bool:
        try:
            response = await self._send("GET", path, None, False, httpx.Timeout(timeout_s))
        except UnavailableError:
            return False
        return response.status_code == HTTPStatus.OK

    async def _attempt(self, path: str, body: Mapping[str, Any], timeout_s: float) -> str:
        """Sends a change of weights. Returns why the server refused, or ""."""
        response = await self._send("POST", path, body, True, httpx.Timeout(timeout_s))
        if response.status_code == HTTPStatus.BAD_REQUEST:
            return reason(response)
        self._check(response)
        return ""

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        admin: bool = False,
        timeout: httpx.Timeout | None = None,
    ) -> Any:
        response = await self._send(method, path, body, admin, timeout)
        self._check(response)
        is_json = response.headers.get("content-type", "").startswith("application/json")
        return from_json(response.content) if is_json else None

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, admin: bool, timeout: httpx.Timeout | None
    ) -> httpx.Response:
        request = partial(
            self._http.request,
            method,
            path,
            json=body,
            headers=self._admin if admin else None,
            timeout=timeout or httpx.USE_CLIENT_DEFAULT,
        )
        try:
            return await shielded(request)
        except (httpx.HTTPError, RuntimeError) as error:  # httpx raises RuntimeError once the client is closed
            raise UnavailableError(
                f"{self.TITLE} at {self.url} did not answer {path}: {str(error) or type(error).__name__}"
            ) from None

    def _check(self, response: httpx.Response) -> None:
        status, path = response.status_code, response.request.url.path
        if status == HTTPStatus.OK:
            return
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise ConfigError(f"{self.TITLE} refuses the key for {path}: set {self.KEYS} to the keys of the server")
        if status in (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY):
            raise RequestError(f"{self.TITLE} refuses the request: {reason(response)}")
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            raise UnavailableError(f"{self.TITLE} is not available: {reason(response)}")
        raise EngineError(f"{self.TITLE} answered {path} with {status}: {reason(response)}")


def reason(response: httpx.Response) -> str:
    """The server's own explanation, in whichever format it sent it."""
    try:
        body = from_json(response.content)
    except ValueError:
        body = response.text
    for key in ("error", "message", "detail"):
        if isinstance(body, dict):
            body = body.get(key, body)
    return str(body).strip()[:MAX_REASON_CHARS]


def absolute(folder: Path) -> str:
    """Makes the path absolute, because the server has its own working directory."""
    return str(folder.absolute())


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}
