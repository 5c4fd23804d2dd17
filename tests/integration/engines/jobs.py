"""Jobs for the tests of the engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from services.contract.job import Job, Sink
from services.contract.sampling import Sampling


def make_job(name: str = "j", prompt: list[int] | None = None, n: int = 1, **sampling: Any) -> Job:
    """`name` decides the seed unless one is given. Settings that stop nothing early are the test's business."""
    return Job(
        job_id=name,
        run_id="test",
        prompt_ids=prompt or [5, 6, 7, 8],
        n=n,
        sampling=Sampling(**({"max_tokens": 24} | sampling)),
        sink=Sink.CLIENT,
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0.001)
