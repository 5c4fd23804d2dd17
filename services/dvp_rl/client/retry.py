"""When to retry, and when to give up. Shared by both clients, which only differ in how they sleep."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from dvp_rl.contract.errors import UnavailableError

from .calls import Call, retry_after


@dataclass(frozen=True)
class Retry:
    """Up to `tries` attempts per call, with jittered pauses that double from `first_s` up to `longest_s`."""

    tries: int = 5
    first_s: float = 0.2
    longest_s: float = 10.0
    """Also the longest Retry-After that is obeyed; a longer one is left to the caller."""

    def pauses(self) -> Iterator[float]:
        for i in range(self.tries - 1):
            yield min(self.longest_s, self.first_s * 2**i) * random.uniform(0.5, 1.0)


class Attempts:
    """The attempts of one call."""

    def __init__(self, call: Call[Any], retry: Retry) -> None:
        self._call = call
        self._retry = retry
        self._pauses = retry.pauses()

    def pause_after(self, outcome: httpx.Response | httpx.TransportError) -> float | None:
        """Seconds until the next attempt, or None if `outcome` is final."""
        if not self._transient(outcome):
            return None
        pause = next(self._pauses, None)
        if pause is None or not isinstance(outcome, httpx.Response) or outcome.status_code != 429:
            return pause
        asked = retry_after(outcome)
        return max(asked, pause) if asked <= self._retry.longest_s else None

    def _transient(self, outcome: httpx.Response | httpx.TransportError) -> bool:
        if isinstance(outcome, httpx.Response):
            return outcome.status_code in (429, 502, 503, 504)
        # A long call may still be running on the server: do not pay for it twice.
        return (
            not self._call.long
            or bool(self._call.key)
            or isinstance(outcome, (httpx.ConnectError, httpx.ConnectTimeout))
        )


class Poll:
    """Pauses between polls of a job, and the timeout."""

    def __init__(self, job_id: str, timeout: float) -> None:
        self._job_id = job_id
        self._timeout = timeout
        self._end = time.monotonic() + timeout
        self._pause = 0.02

    def pause(self) -> float:
        """Seconds until the next poll. Raises UnavailableError after `timeout` seconds."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise UnavailableError(f"job {self._job_id}: not finished within {self._timeout:g} s")
        pause = min(self._pause, left)
        self._pause = min(1.5 * self._pause, 1.0)
        return pause
