"""Sends the newest message of each kind to any number of viewers, as server-sent events."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable

from dvp_rl.contract.errors import OverloadedError
from dvp_rl.contract.shares import EVERYBODY, RULE, fits

SILENCE_S = 15.0
"""Longest silence on a stream, in seconds: proxies cut connections that are silent for longer."""
STILL_HERE = b": still here\n\n"
RETRY_AFTER_S = 10.0


class Viewers:
    """The places of those who follow the feed of any run."""

    def __init__(self, max_viewers: int) -> None:
        self.max_viewers = max_viewers
        self.of: Counter[str] = Counter()
        """Places that each caller takes."""

    @property
    def num(self) -> int:
        return self.of.total()

    def admit(self, caller: str = EVERYBODY) -> None:
        """Raises OverloadedError if no place is free, or if this caller would take more places than it leaves free."""
        own, free = self.of[caller], self.max_viewers - self.num
        if free < 1:
            raise OverloadedError(f"{self.max_viewers} viewers are watching already (max_viewers)", RETRY_AFTER_S)
        if not fits(caller, own, 1, free):
            free_places = f"{free} of {self.max_viewers} places (max_viewers) are free"
            raise OverloadedError(f"{caller} has {own} viewers, and {free_places}: {RULE}", RETRY_AFTER_S)


class Feed:
    """The messages of one run, each encoded once. A slow viewer skips messages that newer ones replaced, and never
    delays the others."""

    def __init__(self, viewers: Viewers) -> None:
        self._viewers = viewers
        self.num_viewers = 0
        self.closed = False
        self._messages: dict[str, tuple[int, bytes]] = {}
        self._number = 0
        self._news = asyncio.Event()

    def publish(self, kind: str, data: str) -> None:
        """Replaces the last message of this kind. `data` is one line."""
        self._number += 1
        self._messages[kind] = self._number, f"event: {kind}\ndata: {data}\n\n".encode()
        self._wake()

    def close(self) -> None:
        """Ends every viewer's stream."""
        self.closed = True
        self._wake()

    async def follow(
        self, may_watch: Callable[[], bool] = lambda: True, caller: str = EVERYBODY
    ) -> AsyncIterator[bytes]:
        """Yields the current messages, then new ones, until `close` or until the viewer may no longer watch."""
        seen = 0
        self.num_viewers += 1
        self._viewers.of[caller] += 1
        try:
            while not self.closed and may_watch():
                news = self._news
                fresh = sorted(message for message in self._messages.values() if message[0] > seen)
                for number, data in fresh:
                    yield data
                    seen = number
                try:
                    async with asyncio.timeout(SILENCE_S):
                        await news.wait()
                except TimeoutError:
                    yield STILL_HERE
        finally:
            self.num_viewers -= 1
            self._viewers.of[caller] -= 1

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
