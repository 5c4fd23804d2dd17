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


class Feed:
    """Encodes each message once. A slow viewer skips messages that newer ones replaced, and never delays the others."""

    def __init__(self, max_viewers: int) -> None:
        self._viewers: Counter[str] = Counter()
        self._watched: Counter[str] = Counter()
        """Viewers of each run."""
        self.max_viewers = max_viewers
        self._messages: dict[tuple[str, str], tuple[int, bytes]] = {}
        self._number = 0
        self._news = asyncio.Event()
        self._closed = False

    def publish(self, run_id: str, kind: str, data: str) -> None:
        """Replaces the last message of this kind for the viewers of this run, or of every run (""). `data` is one
        line."""
        self._number += 1
        self._messages[run_id, kind] = self._number, f"event: {kind}\ndata: {data}\n\n".encode()
        self._wake()

    def forget(self, run_id: str) -> None:
        """Drops the messages for the viewers of this run."""
        self._messages = {key: message for key, message in self._messages.items() if key[0] != run_id}

    def is_watched(self, run_id: str) -> bool:
        return self._watched[run_id] > 0

    def close(self) -> None:
        """Ends every viewer's stream."""
        self._closed = True
        self._wake()

    @property
    def num_viewers(self) -> int:
        return self._viewers.total()

    def admit(self, caller: str = EVERYBODY) -> None:
        """Raises OverloadedError if no place is free, or if this caller would take more places than it leaves free."""
        own, free = self._viewers[caller], self.max_viewers - self.num_viewers
        if free < 1:
            raise OverloadedError(f"{self.max_viewers} viewers are watching already (max_viewers)", RETRY_AFTER_S)
        if not fits(caller, own, 1, free):
            free_places = f"{free} of {self.max_viewers} places (max_viewers) are free"
            raise OverloadedError(f"{caller} has {own} viewers, and {free_places}: {RULE}", RETRY_AFTER_S)

    async def follow(
        self, run_id: str, may_watch: Callable[[], bool] = lambda: True, caller: str = EVERYBODY
    ) -> AsyncIterator[bytes]:
        """Yields the current messages, then new ones, until `close` or until the viewer may no longer watch."""
        seen = 0
        self._viewers[caller] += 1
        self._watched[run_id] += 1
        try:
            while not self._closed and may_watch():
                news = self._news
                fresh = sorted(
                    message for (run, _), message in self._messages.items() if run in ("", run_id) and message[0] > seen
                )
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
            self._watched[run_id] -= 1

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
