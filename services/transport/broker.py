"""One connection to Redis or Valkey for one run: bounded waits, scripts, consumer groups."""

from __future__ import annotations

from typing import Any, Self

from redis.asyncio import Redis

from services.contract.keys import Keys

MAX_BLOCK_MS = 5_000
"""Blocking reads are cut to this, well below the socket timeout."""


class Broker:
    """`await Broker.connect(url, run_id)`, then `async with broker:` or `await broker.close()`."""

    redis: Redis
    keys: Keys

    @property
    def run_id(self) -> str:
        return self.keys.run_id

    @classmethod
    async def connect(cls, url: str, run_id: str) -> Self:
        """Raises ConfigError (bad URL or run id, nobody answers, wrong password) naming host and port, never the password."""
        raise NotImplementedError

    async def script(self, name: str, keys: list[str], args: list[Any]) -> Any:
        """Runs lua/<name>.lua. Raises LeaseLostError (not owner, fenced off), UnavailableError (broker gone or too slow)."""
        raise NotImplementedError

    async def ensure_groups(self) -> None:
        """Creates the consumer groups that do not exist: at connect, and again after a broker was wiped."""
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
