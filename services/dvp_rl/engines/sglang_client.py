"""The HTTP calls that the engine makes to an SGLang server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from dvp_rl.contract.transfer import Offer

from .server_client import ABORTS_AT_ONCE, CALL_S, GENERATE_S, HEALTH_S, READY_S, ServerClient, absolute
from .sglang_wire import EMPTY_PIECE, group_body, piece_body


class SglangClient(ServerClient):
    TITLE = "SGLang"
    KEYS = "sglang.api_key and sglang.admin_key"

    def __init__(self, url: str, *, api_key: str = "", admin_key: str = "") -> None:
        super().__init__(url, api_key=api_key, admin_key=admin_key)
        self._aborts = asyncio.Semaphore(ABORTS_AT_ONCE)

    async def generate(self, body: Mapping[str, Any]) -> Any:
        """The answer as parsed JSON. Numbers that are not finite arrive as null."""
        return await self._call("POST", "/generate", body, timeout=httpx.Timeout(GENERATE_S, connect=READY_S))

    async def abort(self, request_ids: Sequence[str]) -> None:
        async def one(request_id: str) -> None:
            async with self._aborts:
                await self._call("POST", "/abort_request", {"rid": request_id}, admin=True)

        await asyncio.gather(*map(one, request_ids))

    async def is_ready(self) -> bool:
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
        body = {"model_path": absolute(folder), "weight_version": version, "flush_cache": True}
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
