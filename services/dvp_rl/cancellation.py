"""Cancellation that lets libraries clean up.

`Task.cancel` strikes at whatever await a task is in, and libraries close connections in their ordinary course, too:
before a request httpcore closes those that were idle for too long, one after the other. Cut short there, it leaves the
rest open and in nobody's hands until garbage is collected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

import anyio

T = TypeVar("T")

CANCEL_AGAIN_S = 0.25


async def cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels and waits until they are gone, also if the caller is cancelled meanwhile. What they raise was logged
    where it happened. A task that nobody waits for may still be cleaning up when its event loop ends, and is then cut
    short."""
    pending, cancelled = set(tasks), False
    while pending:
        for task in pending:
            task.cancel()
        try:
            # Again after a while: an awaited reply that arrives at the same moment can swallow a cancellation.
            _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
        except asyncio.CancelledError:
            cancelled = True
            pending = {task for task in pending if not task.done()}
    if cancelled:
        raise asyncio.CancelledError


async def finished(work: Coroutine[Any, Any, T], hasten: Callable[[], object] = lambda: None) -> T:
    """The result of `work`. A cancellation calls `hasten`, waits for the end of the work and is raised then: the work
    needs a bound of its own."""
    task, cancelled = asyncio.create_task(work), False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
            hasten()
    if cancelled:
        if not task.cancelled():
            task.exception()  # asked for, so that asyncio does not report it
        raise asyncio.CancelledError
    return task.result()


async def shielded(work: Callable[[], Awaitable[T]]) -> T:
    """The result of `work()`. A cancellation ends it in AnyIO's way: what httpx shields is finished first."""
    scope = anyio.CancelScope()

    async def scoped() -> T:
        with scope:
            return await work()
        raise asyncio.CancelledError

    return await finished(scoped(), scope.cancel)
