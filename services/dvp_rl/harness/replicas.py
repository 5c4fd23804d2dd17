"""The replicas of a run, as a harness sees them."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from typing import Self, TypeVar

from pydantic import BaseModel

from dvp_rl.cancellation import finished
from dvp_rl.client import AsyncClient, Retry
from dvp_rl.client.calls import Call
from dvp_rl.contract.errors import EngineError, OverloadedError, UnavailableError

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=BaseModel)

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
ENGINE_TRIES = 3
TELL_AFTER_S = 5.0
"""Time without an answer after which the log says so, in seconds: a replica that is busy for a moment is nothing."""


class Replicas:
    """Sends each call to one replica and, if that does not do it, to the next one."""

    def __init__(self, urls: Sequence[str], token: str, patience_s: float) -> None:
        """`patience_s`: longest time without an answer of any replica, in seconds."""
        self._clients = [AsyncClient(url, token=token or None, retry=Retry(tries=1)) for url in urls]
        self._patience_s = patience_s
        self._failing_since: float | None = None
        """Monotonic time of the first failure since a call was answered."""
        self._told = False

    async def send(self, call: Call[R], first: int) -> tuple[R, int]:
        """The answer, and the number of the replica that gave it. `first`: that of the replica to begin with.

        Raises UnavailableError or OverloadedError once no replica has answered any call for `patience_s`, EngineError
        for the third one, and at once what trying again would not change.
        """
        num, pause_s = len(self._clients), FIRST_PAUSE_S
        while True:
            asked = (first + call.num_retries) % num
            try:
                answer = await self._clients[asked].send(call)
            except EngineError:
                if call.num_retries + 1 >= ENGINE_TRIES:
                    raise
            except (OverloadedError, UnavailableError) as error:
                self._look_at(error)
                if isinstance(error, OverloadedError):
                    pause_s = max(pause_s, error.retry_after_s / num)
            else:
                self._look_at(None)
                return answer, asked
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            call = call.again()
            pause_s = min(LONGEST_PAUSE_S, pause_s * 2 ** (1 / num))

    def _look_at(self, error: OverloadedError | UnavailableError | None) -> None:
        """Raises the error if it has been like that for too long."""
        now = time.monotonic()
        if error is None:
            if self._told:
                logger.info("a replica answers again")
            self._failing_since, self._told = None, False
            return
        since = self._failing_since = self._failing_since or now
        if now - since > self._patience_s:
            raise error
        if now - since >= TELL_AFTER_S and not self._told:
            self._told = True
            logger.warning("%s; trying again for at most %g s", error, self._patience_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await finished(self._close())

    async def _close(self) -> None:
        for client in self._clients:
            await client.close()
