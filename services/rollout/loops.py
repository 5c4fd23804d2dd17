"""Background work that outlives every outage."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from services.contract.errors import DvpError, UnavailableError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MIN_DELAY_S = 0.1
MAX_DELAY_S = 2.0


async def keep_doing(what: str, step: Callable[[], Awaitable[object]]) -> None:
    """Repeats `step` until cancelled. A failure is logged once per outage and retried with growing delays."""
    delay = MIN_DELAY_S
    while True:
        try:
            await step()
            if delay > MIN_DELAY_S:
                logger.info("%s: works again", what)
            delay = MIN_DELAY_S
        except Exception as error:  # a task boundary: the loop has to live on
            if delay == MIN_DELAY_S:
                expected = isinstance(error, DvpError)
                logger.warning("%s: %s; trying again", what, error, exc_info=None if expected else error)
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_DELAY_S)


async def outlast(what: str, call: Callable[[], Awaitable[T]], patience_s: float) -> T:
    """The result of an idempotent `call`, repeated while the broker is away. Raises UnavailableError in the end."""
    clock = asyncio.get_running_loop().time
    give_up, delay = clock() + patience_s, MIN_DELAY_S
    while True:
        try:
            return await call()
        except UnavailableError as error:
            if clock() + delay > give_up:
                raise
            logger.warning("%s: %s; trying again", what, error)
        await asyncio.sleep(delay)
        delay = min(2 * delay, MAX_DELAY_S)


async def cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancels and waits until they are gone; what they raise was logged where it happened."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
