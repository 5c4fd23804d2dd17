"""How much this replica takes on: one count for HTTP requests and queued jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from services.contract.errors import OverloadedError

RETRY_AFTER_S = 1.0


class Slots:
    """Counts samples that generate or wait for the engine."""

    def __init__(self, capacity: int, max_waiting: int) -> None:
        self.capacity = capacity
        self.max_waiting = max_waiting
        self.in_use = 0
        self._freed = asyncio.Event()

    @property
    def free(self) -> int:
        return max(0, self.capacity - self.in_use)

    def admit(self, n: int) -> None:
        """Raises OverloadedError if `n` more samples would wait too long. An idle replica takes any n."""
        limit = self.capacity + self.max_waiting
        if self.in_use and self.in_use + n > limit:
            raise OverloadedError(
                f"{self.in_use} samples are in flight on this replica and {n} more exceed its limit of {limit}",
                RETRY_AFTER_S,
            )

    @contextmanager
    def hold(self, n: int) -> Iterator[None]:
        self.in_use += n
        try:
            yield
        finally:
            self.in_use -= n
            self._freed.set()

    async def wait_free(self) -> int:
        """The number of free slots, at least 1."""
        while not self.free:
            self._freed.clear()
            await self._freed.wait()
        return self.free
