"""Runs reward functions in worker processes, with a time limit per sample and a memory limit per worker.

Every worker (reward_worker.py) gets one line per chunk of requests and answers with one line per request. A request
that raises, returns no numbers or exceeds a limit fails alone. A request that hangs in code which ignores signals, or
kills its process, fails too, and its worker is replaced; the new worker continues with the rest of the chunk. A request
is one completion, or a group if the reward has TRL's form.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import NamedTuple, Self

from dvp_rl.contract.errors import ConfigError, UnavailableError
from dvp_rl.workers.limits import Limits
from dvp_rl.workers.process import WorkerLostError, WorkerProcess

from .prompts import Row, as_json
from .reward_forms import Form, Request

log = logging.getLogger(__name__)

MAX_CHUNK = 32
SECTION = "reward."
TOO_SLOW = Limits(0, 0, SECTION).too_slow
CLOSED = "the reward pool was closed"


class RewardRequest(NamedTuple):
    """A row and some of its completions; the own form takes one completion per request."""

    row: Row
    completions: Sequence[str]
    completion_ids: Sequence[Sequence[int]] = ()
    """Token ids per completion; needed only for TRL's form."""

    def to_json(self) -> Request:
        row = self.row
        messages = None
        if not isinstance(row.prompt, str):
            messages = [{"role": message.role, "content": message.content} for message in row.prompt]
        return Request(
            completions=list(self.completions),
            completion_ids=[list(ids) for ids in self.completion_ids],
            prompt=row.text,
            messages=messages,
            answer=row.answer,
            columns=row.columns,
            answer_column=row.answer_column,
        )


class RewardResult(NamedTuple):
    """What became of one completion."""

    value: float | None
    """Finite reward; None if the function failed."""
    error: str | None
    """Begins with the row number."""
    seconds: float
    """The request's time, divided by its completions."""
    trace: str = ""
    """Traceback of the failure, if there was an exception."""

    @property
    def timed_out(self) -> bool:
        return self.error is not None and TOO_SLOW in self.error


class _Chunk(NamedTuple):
    requests: Sequence[RewardRequest]
    results: asyncio.Future[list[RewardResult]]

    def fail(self, error: Exception) -> None:
        if not self.results.done():
            self.results.set_exception(error)


class RewardPool:
    """Usage: `async with RewardPool("math", workers=2, timeout_s=10) as pool: results = await pool.score(requests)`."""

    def __init__(self, reward: str, *, workers: int = 1, timeout_s: float = 10.0, memory_mib: int = 2048) -> None:
        """`timeout_s` applies per sample, `memory_mib` per worker."""
        self._reward, self._limits, self._num_workers = reward, Limits(timeout_s, memory_mib, SECTION), workers
        self._chunks: asyncio.Queue[_Chunk] = asyncio.Queue(maxsize=2 * workers)
        self._workers: list[_Worker] = []
        self.form = Form.OWN
        """The form of the reward function, known after `start`."""
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Raises ConfigError if the reward function cannot be imported."""
        self._workers = [_Worker(self._reward, self._limits) for _ in range(self._num_workers)]
        try:
            await asyncio.gather(*(worker.start() for worker in self._workers))
        except BaseException:
            await self.close()
            raise
        self.form = self._workers[0].form
        self._tasks = [asyncio.create_task(self._serve(worker)) for worker in self._workers]

    def requests(
        self, row: Row, completions: Sequence[str], completion_ids: Sequence[Sequence[int]]
    ) -> list[RewardRequest]:
        """Requests for these completions of a row, as the reward's form takes them."""
        if self.form is Form.TRL:
            return [RewardRequest(row, completions, completion_ids)]
        return [RewardRequest(row, [completion]) for completion in completions]

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """One result per completion, in order. Waits for a free queue slot while the pool is busy.

        Raises ConfigError if a worker's replacement does not start, UnavailableError if the pool is closed meanwhile.
        """
        assert self._tasks, "score needs a started pool"
        size = max(1, min(MAX_CHUNK, len(requests) // (4 * self._num_workers)))
        loop = asyncio.get_running_loop()
        chunks = [_Chunk(requests[i : i + size], loop.create_future()) for i in range(0, len(requests), size)]
        try:
            for chunk in chunks:
                await self._chunks.put(chunk)
            parts = await asyncio.gather(*(chunk.results for chunk in chunks))
        finally:
            for chunk in chunks:  # they are not awaited after this
                chunk.results.cancel()
        return [result for part in parts for result in part]

    async def close(self) -> None:
        """Ends every process; pending calls of `score` raise UnavailableError."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        while not self._chunks.empty():
            self._chunks.get_nowait().fail(UnavailableError(CLOSED))
            await asyncio.sleep(0)  # lets a `score` that waits for a slot put its next chunk
        await asyncio.gather(*(worker.stop() for worker in self._workers))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _serve(self, worker: _Worker) -> None:
        while True:
            chunk = await self._chunks.get()
            if chunk.results.done():
                continue
            try:
                results = await worker.score(chunk.requests)
            except asyncio.CancelledError:
                chunk.fail(UnavailableError(CLOSED))
                raise
            except Exception as error:  # noqa: BLE001 - passed to the caller of `score`
                chunk.fail(error)
            else:
                if not chunk.results.done():
                    chunk.results.set_result(results)


class _Worker:
    """One worker process, restarted whenever a sample kills it."""

    def __init__(self, reward: str, limits: Limits) -> None:
        self._limits = limits
        self._process = WorkerProcess("dvp_trainer.data.reward_worker", "reward.name", reward, limits)
        self.form = Form.OWN

    async def start(self) -> None:
        self.form = Form((await self._process.start())["form"])

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        results: list[list[RewardResult]] = []
        while len(results) < len(requests):
            try:
                if not self._process.is_alive():
                    await self.stop()
                    await self.start()
                await self._score_rest(requests, results)
            except WorkerLostError as error:
                await self.stop()
                lost = requests[len(results)]
                log.warning("reward of row %d: %s; the worker process is replaced", lost.row.index, error)
                failed = RewardResult(None, f"row {lost.row.index}: {error}", self._limits.timeout_s)
                results.append([failed] * len(lost.completions))
            except BaseException:
                await self.stop()
                raise
        return [result for of_request in results for result in of_request]

    async def _score_rest(self, requests: Sequence[RewardRequest], results: list[list[RewardResult]]) -> None:
        """Appends results as they arrive. Raises WorkerLostError at the request that kills the process."""
        rest = [request.to_json() for request in requests[len(results) :]]
        try:
            line = json.dumps(rest, default=as_json).encode()
        except (TypeError, ValueError) as error:
            rows = f"rows {requests[0].row.index} to {requests[-1].row.index}"
            raise ConfigError(f"{rows}: a column cannot be passed to the reward as JSON: {error}") from None
        self._process.send(line)
        while len(results) < len(requests):
            limit_s = self._limits.timeout_s * len(requests[len(results)].completions)
            for outcomes, seconds in await self._process.receive(limit_s):
                row, each_s = requests[len(results)].row.index, seconds / len(outcomes)
                results.append(
                    [
                        RewardResult(value, None if error is None else f"row {row}: {error}", each_s, trace)
                        for value, error, trace in outcomes
                    ]
                )

    async def stop(self) -> None:
        await self._process.stop()
