"""Waiting for a condition, never for a duration."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

WITHIN_S = 300.0
"""Timeout of every wait in a test, in seconds: ten times the start of a server on two quiet cores. Only a
failure takes this long."""
PAUSE_S = 0.005

T = TypeVar("T")


def until(look: Callable[[], T], what: str = "the condition") -> T:
    """The first true answer of `look`."""
    deadline = time.monotonic() + WITHIN_S
    while not (answer := look()):
        assert time.monotonic() < deadline, f"{what}: not within {WITHIN_S:g} s"
        time.sleep(PAUSE_S)
    return answer


async def until_async(look: Callable[[], Awaitable[T] | T]) -> T:
    """The first true answer of `look`, which may be a coroutine function."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            found = look()
            if answer := await found if inspect.isawaitable(found) else found:
                return answer
            await asyncio.sleep(PAUSE_S)
