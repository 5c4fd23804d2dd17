"""Jobs for the tests of the engines, and ways to wait for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Module

from dvp_rl.contract.job import Job, Sink
from dvp_rl.contract.sampling import Sampling
from dvp_rl.engines.protocol import Engine
from dvp_rl.engines.sglang import SglangEngine
from dvp_rl.engines.transformers import TransformersEngine
from dvp_rl.engines.vllm import VllmEngine
from tests.kit.wait import WITHIN_S, until_async


def make_job(name: str = "j", prompt: list[int] | None = None, n: int = 1, **sampling: Any) -> Job:
    """`name` decides the seed unless one is given. A test that needs long samples must pass settings for them."""
    return Job(
        job_id=name,
        run_id="test",
        prompt_ids=prompt or [5, 6, 7, 8],
        n=n,
        sampling=Sampling(**({"max_tokens": 24} | sampling)),
        sink=Sink.CLIENT,
    )


async def drawing(engine: Engine) -> None:
    """Waits until the engine's capacity is in use and each running sample has a token of the weights now served."""
    await _reaches(engine, engine.capacity, since=time.time())
    if isinstance(engine, VllmEngine):
        # Its samples get their first token in the step that takes them in, which may be the one now running.
        for _ in range(3):
            await engine._client.facts()


async def idle(engine: Engine) -> None:
    await _reaches(engine, 0)


async def _reaches(engine: Engine, num_running: int, since: float = 0.0) -> None:
    """`since`: see SglangClient.num_running."""

    async def reached() -> bool:
        return await _num_running(engine, since) == num_running

    await until_async(reached)


async def _num_running(engine: Engine, since: float) -> int:
    """The number that a server itself reports, not the engine's count of its requests."""
    if isinstance(engine, SglangEngine):
        return await engine._client.num_running(since)
    return (await engine._client.facts()).num_running if isinstance(engine, VllmEngine) else engine.num_running


@contextmanager
def held(engine: TransformersEngine, rows: int = 1) -> Iterator[None]:
    """Blocks forwards of at least `rows` rows until the context ends, so that earlier jobs stay in flight meanwhile."""
    over = threading.Event()

    def wait(module: Module, args: Any, kwargs: dict[str, Any]) -> None:
        if len(kwargs["input_ids"]) >= rows:
            over.wait(WITHIN_S)

    hook = engine._model.register_forward_pre_hook(wait, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
        over.set()
