"""The newest message of each kind, as server-sent events for any number of viewers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable

from dvp_rl.contract.errors import OverloadedError
from dvp_rl.contract.shares import EVERYBODY, RULE, fits

SILENCE_S = 15.0
"""Proxies cut connections that say nothing for longer."""
STILL_HERE = b": still here\n\n"
RETRY_AFTER_S = 10.0


class Feed:
    """A message is encoded once. A slow viewer skips what was overtaken; it never holds up the others."""

    def __init__(self, max_viewers: int) -> None:
        self._viewers: Counter[str] = Counter()
        self.max_viewers = max_viewers
        self._messages: dict[str, tuple[int, bytes]] = {}
        self._number = 0
        self._news = asyncio.Event()
        self._closed = False

    def publish(self, kind: str, data: str) -> None:
        """`data`: one line."""
        self._number += 1
        self._messages[kind] = self._number, f"event: {kind}\ndata: {data}\n\n".encode()
        self._wake()

    def close(self) -> None:
        """Ends every viewer's stream."""
        self._closed = True
        self._wake()

    @property
    def num_viewers(self) -> int:
        return self._viewers.total()

    def admit(self, caller: str = EVERYBODY) -> None:
        """Raises OverloadedError when enough are watching, or more of this caller than it leaves free."""
        own, free = self._viewers[caller], self.max_viewers - self.num_viewers
        if free < 1:
            raise OverloadedError(f"{self.max_viewers} viewers are watching already", RETRY_AFTER_S)
        if not fits(caller, own, 1, free):
            raise OverloadedError(f"{own} viewers are {caller}, and {free} more may watch: {RULE}", RETRY_AFTER_S)

    async def follow(
        self, may_watch: Callable[[], bool] = lambda: True, caller: str = EVERYBODY
    ) -> AsyncIterator[bytes]:
        """What there is, then what comes, until `close` or until the viewer may watch no longer."""
        seen = 0
        self._viewers[caller] += 1
        try:
            while not self._closed and may_watch():
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
            self._viewers[caller] -= 1

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
