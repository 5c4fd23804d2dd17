"""The replicas of a run, as a harness sees them."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from typing import TypeVar

from pydantic import BaseModel

from dvp_rl.client import AsyncClient, Retry
from dvp_rl.client.calls import Call
from dvp_rl.contract.errors import EngineError, OverloadedError, UnavailableError

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=BaseModel)

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
ENGINE_TRIES = 3


class Replicas:
    """Sends each call to one replica and, if that does not do it, to the next one."""

    def __init__(self, urls: Sequence[str], token: str, patience_s: float) -> None:
        """`patience_s`: longest time without an answer of any replica, in seconds."""
        self._clients = [AsyncClient(url, token=token or None, retry=Retry(tries=1)) for url in urls]
        self._patience_s = patience_s
        self._failing_since: float | None = None
        """Monotonic time of the first failure since a call was answered."""

    async def send(self, call: Call[R], first: int) -> R:
        """The answer. `first`: number of the replica to begin with.

        Raises UnavailableError or OverloadedError once no replica has answered any call for `patience_s`, EngineError
        for the third one, and at once what trying again would not change.
        """
        num, num_tries, pause_s = len(self._clients), 0, FIRST_PAUSE_S
        while True:
            try:
                answer = await self._clients[(first + num_tries) % num].send(call)
            except EngineError:
                if num_tries + 1 >= ENGINE_TRIES:
                    raise
            except UnavailableError as error:
                self._look_at(error)
            except OverloadedError as error:
                self._look_at(error)
                pause_s = max(pause_s, error.retry_after_s / num)
            else:
                self._look_at(None)
                return answer
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            num_tries += 1
            pause_s = min(LONGEST_PAUSE_S, pause_s * 2 ** (1 / num))

    def _look_at(self, error: OverloadedError | UnavailableError | None) -> None:
        """Raises the error if it has been like that for too long."""
        now = time.monotonic()
        if error is None:
            if self._failing_since is not None and now - self._failing_since > LONGEST_PAUSE_S:
                logger.info("a replica answers again, after %.0f s", now - self._failing_since)
            self._failing_since = None
        elif self._failing_since is None:
            self._failing_since = now
            logger.warning("%s; trying again for at most %g s", error, self._patience_s)
        elif now - self._failing_since > self._patience_s:
            raise error

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
