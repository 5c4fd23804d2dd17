"""Commands from the event loop to the worker thread, and the worker's replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor
from transformers.cache_utils import DynamicCache

from dvp_rl.contract.group import Sample
from dvp_rl.contract.job import Job


@dataclass(frozen=True)
class Reply:
    """Settles a future of the event loop from any thread."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]

    def result(self, value: Any) -> None:
        self._send(lambda: self.future.set_result(value))

    def error(self, error: BaseException) -> None:
        self._send(lambda: self.future.set_exception(error))

    def _send(self, settle: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed, so nothing awaits the future
            self.loop.call_soon_threadsafe(lambda: None if self.future.done() else settle())


@dataclass(frozen=True)
class Prefill:
    """A prompt's keys and values (row `index` of `cache`) and the logits [1, V] after its last token."""

    cache: DynamicCache
    index: int
    logits: Tensor


@dataclass(eq=False)
class Submission:
    """A job in progress: first waiting, then spread over rows, then complete."""

    job: Job
    reply: Reply
    urgent: bool = False
    placed: int = 0
    """Number of samples that have or had a row."""
    samples: dict[int, Sample] = field(default_factory=dict)
    prefill: Prefill | None = None
    """Kept while some of the samples still wait for a row."""

    @property
    def unplaced(self) -> int:
        return self.job.n - self.placed

    def start_over(self) -> None:
        self.placed, self.samples, self.prefill = 0, {}, None

    def reply_if_whole(self) -> bool:
        """Replies if all samples are finished; returns whether it did."""
        whole = len(self.samples) == self.job.n
        if whole:
            self.reply.result(tuple(self.samples[i] for i in range(self.job.n)))
        return whole


@dataclass(frozen=True)
class Cancel:
    submission: Submission


@dataclass(frozen=True)
class Swap:
    weights: dict[str, Tensor]
    version: str
    reply: Reply


@dataclass(frozen=True)
class Stop:
    pass


Command: TypeAlias = Submission | Cancel | Swap | Stop
