"""Background work: repeating, retrying and ending it."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from dvp_rl.contract.errors import DvpError, UnavailableError, is_refusal

logger = logging.getLogger(__name__)

T = TypeVar("T")

MIN_DELAY_S = 0.1
MAX_DELAY_S = 2.0


def pauses() -> Iterator[float]:
    """Seconds before each retry: exponential backoff with jitter, so that replicas that lost the broker together do not
    all come back together."""
    longest = MIN_DELAY_S
    while True:
        yield longest * random.uniform(0.5, 1.0)
        longest = min(2 * longest, MAX_DELAY_S)


async def keep_doing(what: str, step: Callable[[], Awaitable[object]]) -> None:
    """Repeats `step` until cancelled. A failure is logged once per outage and retried after `pauses`."""
    outage: Iterator[float] | None = None
    while True:
        try:
            await step()
            if outage is not None:
                logger.info("%s: works again", what)
            outage = None
        except Exception as error:  # a task boundary: the loop must survive
            if outage is None:
                expected = isinstance(error, DvpError) or is_refusal(error)
                logger.warning("%s: %s; trying again", what, error, exc_info=None if expected else error)
                outage = pauses()
            await asyncio.sleep(next(outage))


async def outlast(what: str, call: Callable[[], Awaitable[T]], patience_s: float) -> T:
    """The result of an idempotent `call`, retried while the broker is away. Raises UnavailableError rather than wait
    longer than `patience_s`."""
    clock = asyncio.get_running_loop().time
    give_up = clock() + patience_s
    for pause in pauses():
        try:
            return await call()
        except UnavailableError as error:
            if clock() + pause > give_up:
                raise
            logger.warning("%s: %s; trying again", what, error)
        await asyncio.sleep(pause)
    raise AssertionError("unreachable")
