"""Task cancellation that lets libraries clean up.

`Task.cancel` interrupts a task at whatever it awaits, which may be a library's own cleanup: before each request,
httpcore closes expired idle connections one by one. If it is interrupted there, the rest stay open and unowned until
garbage collection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Never, TypeVar, overload

import anyio

T = TypeVar("T")

CANCEL_AGAIN_S = 0.25


async def cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels the tasks and waits until they have ended, even if the caller is cancelled meanwhile. Their exceptions
    are not raised: they were logged where they occurred. A task that nobody awaits may still be cleaning up when its
    event loop ends, and is then cut short."""
    pending, cancelled = set(tasks), False
    while pending:
        for task in pending:
            task.cancel()
        try:
            # Cancel again after a while: an awaited reply that arrives at the same moment can swallow a cancellation.
            _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
        except asyncio.CancelledError:
            cancelled = True
            pending = {task for task in pending if not task.done()}
    if cancelled:
        raise asyncio.CancelledError


@overload
async def race(work: Coroutine[Any, Any, T], end: Coroutine[Any, Any, Never]) -> T: ...


@overload
async def race(work: Coroutine[Any, Any, T], end: Coroutine[Any, Any, object]) -> T | None: ...


async def race(work: Coroutine[Any, Any, T], end: Coroutine[Any, Any, object]) -> T | None:
    """The result of `work`, or None if `end` comes first; raises what the winner raises. The loser is cancelled."""
    working, ending = asyncio.create_task(work), asyncio.create_task(end)
    try:
        await asyncio.wait((working, ending), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        ending.result()
        return None
    finally:
        await cancel((working, ending))


async def finished(work: Coroutine[Any, Any, T], hasten: Callable[[], object] = lambda: None) -> T:
    """The result of `work`. A cancellation calls `hasten` and is raised once the work has ended, so the work needs a
    time limit of its own."""
    task, cancelled = asyncio.create_task(work), False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
            hasten()
    if cancelled:
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not report it
        raise asyncio.CancelledError
    return task.result()


async def shielded(work: Callable[[], Awaitable[T]]) -> T:
    """The result of `work()`. A cancellation ends it through AnyIO, so that what httpx shields finishes first."""
    scope = anyio.CancelScope()

    async def scoped() -> T:
        with scope:
            return await work()
        raise asyncio.CancelledError

    return await finished(scoped(), scope.cancel)
