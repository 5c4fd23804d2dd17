"""Runs reward functions in worker processes, with a time limit per sample and a memory limit per worker.

Every worker is a fresh interpreter (reward_worker.py) connected by a pair of pipes that carry JSON lines: one line in
per chunk of requests, one line out per request. A request that raises, returns no numbers or exceeds a limit fails
alone. A request that hangs in code which ignores signals, or kills its process, fails too, and its worker is replaced;
the new worker continues with the rest of the chunk. A request is one completion, or a group if the reward has TRL's
form.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from dvp_rl.contract.errors import ConfigError, UnavailableError

from .prompts import Row, as_json
from .reward_forms import Form, Request
from .reward_worker import TIME_LIMIT

log = logging.getLogger(__name__)

MAX_CHUNK = 32
START_TIMEOUT_S = 120.0
GRACE_S = 1.0
"""Extra time beyond the time limit before a worker is killed, in seconds."""
LAST_LOOK_S = 0.2
"""Time for a last read of the pipe after that, in seconds: this event loop itself may have been blocked until then."""
READ_BYTES = 1 << 16
CLOSED = "the reward pool was closed"

# Uses -P and the parent's sys.path: `-m` would put the working directory first, and a user's math.py would shadow
# Python's.
BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from dvp_trainer.data.reward_worker import main; main(sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))"
)


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
        return self.error is not None and TIME_LIMIT in self.error


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
        self._reward, self._timeout_s, self._memory_mib, self._num_workers = reward, timeout_s, memory_mib, workers
        self._chunks: asyncio.Queue[_Chunk] = asyncio.Queue(maxsize=2 * workers)
        self._workers: list[_Worker] = []
        self.form = Form.OWN
        """The form of the reward function, known after `start`."""
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Raises ConfigError if the reward function cannot be imported."""
        self._workers = [_Worker(self._reward, self._timeout_s, self._memory_mib) for _ in range(self._num_workers)]
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


class WorkerLostError(Exception):
    """The worker process died or stopped responding, at start or while scoring a sample."""


class _Worker:
    """One worker process, restarted whenever a sample kills it."""

    def __init__(self, reward: str, timeout_s: float, memory_mib: int) -> None:
        self._reward, self._timeout_s, self._memory_mib = reward, timeout_s, memory_mib
        self._process: Process | None = None
        self._unread = b""
        self.form = Form.OWN

    async def start(self) -> None:
        limits = (str(self._timeout_s), str(self._memory_mib))
        command = (sys.executable, "-P", "-c", BOOTSTRAP, json.dumps(sys.path), self._reward, *limits)
        # A separate session: Ctrl-C at the terminal reaches only the trainer, and a kill includes grandchildren.
        self._process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, start_new_session=True)
        self._unread = b""
        try:
            (hello, *_) = await self._read_lines(START_TIMEOUT_S)
        except WorkerLostError as error:
            raise ConfigError(f"reward.name {self._reward!r}: its worker process did not start: {error}") from None
        if "error" in hello:
            raise ConfigError(hello["error"])
        self.form = Form(hello["form"])

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        results: list[list[RewardResult]] = []
        while len(results) < len(requests):
            try:
                if not self._is_alive():
                    await self.stop()
                    await self.start()
                await self._score_rest(requests, results)
            except WorkerLostError as error:
                await self.stop()
                lost = requests[len(results)]
                log.warning("reward of row %d: %s; the worker process is replaced", lost.row.index, error)
                failed = RewardResult(None, f"row {lost.row.index}: {error}", self._timeout_s)
                results.append([failed] * len(lost.completions))
            except BaseException:
                await self.stop()
                raise
        return [result for of_request in results for result in of_request]

    def _is_alive(self) -> bool:
        """Asks the kernel where possible: asyncio notices a death a moment later, which would cost a sample."""
        if self._process is None or self._process.returncode is not None:
            return False
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return True
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            return False

    async def _score_rest(self, requests: Sequence[RewardRequest], results: list[list[RewardResult]]) -> None:
        """Appends results as they arrive. Raises WorkerLostError at the request that kills the process."""
        assert self._process is not None
        assert self._process.stdin is not None
        rest = [request.to_json() for request in requests[len(results) :]]
        try:
            line = json.dumps(rest, default=as_json).encode()
        except (TypeError, ValueError) as error:
            rows = f"rows {requests[0].row.index} to {requests[-1].row.index}"
            raise ConfigError(f"{rows}: a column cannot be passed to the reward as JSON: {error}") from None
        self._process.stdin.write(line + b"\n")
        while len(results) < len(requests):
            limit_s = self._timeout_s * len(requests[len(results)].completions)
            for outcomes, seconds in await self._read_lines(limit_s + GRACE_S):
                row, each_s = requests[len(results)].row.index, seconds / len(outcomes)
                results.append(
                    [
                        RewardResult(value, None if error is None else f"row {row}: {error}", each_s, trace)
                        for value, error, trace in outcomes
                    ]
                )

    async def _read_lines(self, timeout_s: float) -> list[Any]:
        """One or more messages. A worker sends one per request, so silence means that a request exceeded its limit."""
        lines: list[bytes] = []
        while not lines:
            *lines, self._unread = (self._unread + await self._read(timeout_s)).split(b"\n")
        return [json.loads(line) for line in lines]

    async def _read(self, timeout_s: float) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        for patience in (timeout_s, LAST_LOOK_S):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    data = await self._process.stdout.read(READ_BYTES)
                if not data:
                    raise WorkerLostError(await self._how_it_ended())
                return data
        raise WorkerLostError(f"{TIME_LIMIT} and had to be killed")

    async def _how_it_ended(self) -> str:
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                code = await self._process.wait()
            return f"its process ended {f'by {signal.Signals(-code).name}' if code < 0 else f'with exit status {code}'}"
        return "its process closed its pipe"

    async def stop(self) -> None:
        """Kills the process and everything it started."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:  # otherwise its pid may belong to another process
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()
