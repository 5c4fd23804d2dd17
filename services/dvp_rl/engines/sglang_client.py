"""The HTTP calls that the engine makes to an SGLang server. Every wait is bounded; every failure is a DvpError."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
from pydantic_core import from_json

from dvp_rl.cancellation import finished, shielded
from dvp_rl.contract.errors import ConfigError, EngineError, RequestError, UnavailableError
from dvp_rl.contract.transfer import Offer

from .sglang_wire import EMPTY_PIECE, group_body, piece_body

GENERATE_S = 24 * 3600.0
"""Longest wait for one answer, in seconds. Callers have shorter limits, and the wait ends if the server does."""
CALL_S = 60.0
READY_S = 5.0
IDLE_S = 2.0
"""Lifetime of an idle connection, in seconds: short, because one that the server closes would look like its death."""
HEALTH_S = 30.0
ABORTS_AT_ONCE = 32
MAX_REASON_CHARS = 500


class SglangClient:
    """One server. Raises UnavailableError if it is down, RequestError, EngineError, or ConfigError for a wrong key."""

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
        self._aborts = asyncio.Semaphore(ABORTS_AT_ONCE)

    async def close(self) -> None:
        await finished(self._http.aclose())

    async def generate(self, body: Mapping[str, Any]) -> Any:
        """The answer as parsed JSON. Numbers that are not finite arrive as null."""
        return await self._call("POST", "/generate", body, timeout=httpx.Timeout(GENERATE_S, connect=READY_S))

    async def abort(self, request_ids: Sequence[str]) -> None:
        async def one(request_id: str) -> None:
            async with self._aborts:
                await self._call("POST", "/abort_request", {"rid": request_id}, admin=True)

        await asyncio.gather(*map(one, request_ids))

    async def is_ready(self) -> bool:
        """Whether the server accepts requests, which does not mean that it answers them."""
        return await self._is_ok("/ready", READY_S)

    async def is_healthy(self) -> bool:
        """Whether the server has just generated a token, for this call if necessary. Takes about a second."""
        return await self._is_ok("/health", HEALTH_S)

    async def server_info(self) -> dict[str, Any]:
        info: dict[str, Any] = await self._call("GET", "/server_info")
        return info

    async def served(self) -> tuple[Path, str]:
        """Folder and version of the server's weights, as they were set."""
        info = await self._call("GET", "/model_info")
        return Path(info["model_path"]), info["weight_version"]

    async def num_running(self, since: float = 0.0) -> int:
        """Number of samples that have their first token but not their last; 0 as long as the server's last count is
        from before `since`, in Unix time. It counts now and then while it generates, and never while it is paused."""
        answer = await self._call("GET", "/v1/loads?include=core")
        return sum(load["num_running_reqs"] for load in answer["loads"] if load["timestamp"] >= since)

    async def pause(self) -> None:
        """Pauses generation; requests in flight return to the server's queue without their cache."""
        await self._call("POST", "/pause_generation", {"mode": "retract"}, admin=True)

    async def resume(self) -> None:
        await self._call("POST", "/continue_generation", {"torch_empty_cache": False}, admin=True)

    async def load(self, folder: Path, version: str, timeout_s: float) -> str:
        """Loads a folder into a paused server and empties its cache. Returns why it was refused, or ""."""
        body = {"model_path": _absolute(folder), "weight_version": version, "flush_cache": True}
        return await self._attempt("/update_weights_from_disk", body, timeout_s)

    async def join(self, offer: Offer) -> str:
        """Joins the process group of a transfer. Returns why the server did not, or "". It waits up to half an hour for
        the others and generates nothing meanwhile."""
        try:
            async with asyncio.timeout(READY_S):
                _, writer = await asyncio.open_connection(offer.host, offer.port)
        except OSError as error:
            return str(error) or type(error).__name__
        writer.close()
        return await self._attempt("/init_weights_update_group", group_body(offer), GENERATE_S)

    async def receive(self, offer: Offer, timeout_s: float) -> str:
        """Receives an offer's weights into a paused server that has joined, and empties its cache. Returns why the
        server refused, or ""; after a refusal it may have loaded some of them."""
        if refusal := await self._attempt("/begin_weight_update", {}, timeout_s):
            return refusal
        refusal = await self._receive_pieces(offer, timeout_s)
        not_ended = await self._attempt("/end_weight_update", {}, timeout_s)
        return refusal or not_ended

    async def _receive_pieces(self, offer: Offer, timeout_s: float) -> str:
        path = "/update_weights_from_distributed"
        if not await self._attempt(path, EMPTY_PIECE | {"group_name": offer.group}, timeout_s):
            return "its dvp-sglang does not verify weights: install the version that belongs to this replica"
        for i, piece in enumerate(offer.pieces):
            version = offer.version if i + 1 == len(offer.pieces) else None
            if refusal := await self._attempt(path, piece_body(piece, offer.group, version), timeout_s):
                return refusal
        return ""

    async def leave(self, offer: Offer) -> None:
        await self._attempt("/destroy_weights_update_group", {"group_name": offer.group}, CALL_S)

    async def flush(self) -> None:
        await self._call("POST", "/flush_cache", {}, admin=True)

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
            return _reason(response)
        _check(response)
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
        _check(response)
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
                f"SGLang at {self.url} did not answer {path}: {str(error) or type(error).__name__}"
            ) from None


def _check(response: httpx.Response) -> None:
    status, path = response.status_code, response.request.url.path
    if status == HTTPStatus.OK:
        return
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        raise ConfigError(
            f"SGLang refuses the key for {path}: set sglang.api_key and sglang.admin_key to the keys of the server"
        )
    if status in (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY):
        raise RequestError(f"SGLang refuses the request: {_reason(response)}")
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        raise UnavailableError(f"SGLang is not available: {_reason(response)}")
    raise EngineError(f"SGLang answered {path} with {status}: {_reason(response)}")


def _reason(response: httpx.Response) -> str:
    """The server's own explanation, in whichever format it sent it."""
    try:
        body = from_json(response.content)
    except ValueError:
        body = response.text
    for key in ("error", "message", "detail"):
        if isinstance(body, dict):
            body = body.get(key, body)
    return str(body).strip()[:MAX_REASON_CHARS]


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _absolute(folder: Path) -> str:
    """Makes the path absolute, because the server has its own working directory."""
    return str(folder.absolute())
