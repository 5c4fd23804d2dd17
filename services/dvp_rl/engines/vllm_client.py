"""The HTTP calls that the engine makes to a vLLM server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from pydantic import ValidationError

from dvp_rl.contract.errors import ConfigError, DvpError, EngineError, UnavailableError

from .server_client import CALL_S, GENERATE_S, HEALTH_S, READY_S, ServerClient, absolute
from .vllm_wire import Facts

PREFIX = "generate-tokens-"
"""What vLLM puts before the id of a request."""


class VllmClient(ServerClient):
    TITLE = "vLLM"
    KEYS = "vllm.api_key"

    async def generate(self, body: Mapping[str, Any]) -> Any:
        """The answer as parsed JSON."""
        timeout = httpx.Timeout(GENERATE_S, connect=READY_S)
        try:
            return await self._call("POST", "/inference/v1/generate", body, timeout=timeout)
        except EngineError as error:
            if await self.is_ready():
                raise
            raise UnavailableError(str(error)) from None  # its engine died, and it is about to end

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._call("POST", "/inference/v1/abort_requests", {"request_ids": [PREFIX + id_ for id_ in request_ids]})

    async def is_ready(self) -> bool:
        return await self._is_ok("/health", READY_S)

    async def is_healthy(self) -> bool:
        """Whether its workers answer between two steps; its own check asks only whether they run."""
        try:
            await self._rpc("dvp_facts", (), HEALTH_S)
        except DvpError:
            return False
        return True

    async def facts(self) -> Facts:
        """Those of the first worker. Raises ConfigError if its plugin is not ours."""
        try:
            found, *_ = await self._rpc("dvp_facts", (), CALL_S)
            return Facts.model_validate(found)
        except (EngineError, ValidationError):
            raise ConfigError(
                f"the vLLM server at {self.url} has no dvp-vllm, or another version than this replica: pip install "
                "./deploy/dvp-vllm in its environment, and start it as README.md says under vLLM"
            ) from None

    async def label(self, version: str) -> None:
        """Says how the weights are called from now on."""
        await self._call("POST", "/update_weight_version", {"new_version": version})

    async def pause(self) -> None:
        await self._call("POST", "/pause?mode=keep")

    async def resume(self) -> None:
        await self._call("POST", "/resume")

    async def load(self, folder: Path, version: str, timeout_s: float) -> str:
        refusals = await self._rpc("dvp_load", (absolute(folder),), timeout_s)
        if refusal := next(filter(None, refusals), ""):
            return str(refusal)
        await self.flush()
        await self.label(version)
        return ""

    async def flush(self) -> None:
        await self._call("POST", "/reset_prefix_cache?reset_running_requests=true")

    async def _rpc(self, method: str, arguments: Sequence[str], timeout_s: float) -> list[Any]:
        body = {"method": method, "args": list(arguments), "timeout": timeout_s}
        answer = await self._call("POST", "/collective_rpc", body, timeout=httpx.Timeout(timeout_s, connect=READY_S))
        found: list[Any] = answer["results"]
        return found
