"""An engine that is a server, run by this replica on loopback or elsewhere. It adds what a replica needs: swaps that
cannot mix weights, and recovery of a server that died.

    swap      verify -> pause; requests in flight lose their cache -> load -> resume; the server stamps the tokens
    refused   reload the last folder, because the server may have loaded some of the refused weights -> resume
    death     requests in flight fail with UnavailableError -> restart with the last folder

The last folder holds the weights being served.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar
from uuid import uuid4

from dvp_rl.cancellation import cancel
from dvp_rl.contract.errors import ConfigError, DvpError, EngineError, UnavailableError, WeightError
from dvp_rl.contract.group import EngineFacts, Sample
from dvp_rl.contract.job import Job
from dvp_rl.weights.layout import Stored, check_layout, optional_tensors, read_layout

from .adapter import holds_adapter
from .limits import check_fits
from .protocol import PromptTokens
from .server import Launch, LocalServer, Remote, RemoteServer
from .server_client import ServerClient
from .tokenizer import load_config, load_tokenizer

log = logging.getLogger(__name__)

HEALTH_EVERY_S = 10.0
MAX_UNHEALTHY = 3
"""Consecutive failed health checks after which a running server counts as dead."""
MAX_DEATHS = 3
"""Number of server deaths with the same job in flight after which the job fails."""
MAX_SUSPECTS = 10_000
"""Maximum number of jobs for which server deaths are counted."""
MIN_DELAY_S, MAX_DELAY_S = 1.0, 60.0
"""Backoff between attempts to restart the server, in seconds."""


C = TypeVar("C", bound=ServerClient)


class Flight(NamedTuple):
    """A job in flight on the server, and the request id of each of its samples."""

    job: Job
    request_ids: list[str]


class Deaths(NamedTuple):
    """Server deaths with a given job in flight."""

    number: int
    last_at: float
    """Time of the last death, on the event loop's clock."""


class Weights(NamedTuple):
    folder: Path
    version: str


class Answer(NamedTuple):
    samples: tuple[Sample, ...]
    prompt_tokens: PromptTokens


class ServedEngine(ABC, Generic[C]):
    """See dvp_rl.engines.protocol.Engine, Preferring and Recovering.

    `source`: the server to start, or one that runs. `max_context`: lowers the model's own context. `load_timeout_s`:
    longest time for the server to read a weight folder or receive weights.
    """

    NAME: ClassVar[str]
    """In EngineFacts."""
    TITLE: ClassVar[str]
    """In messages."""

    def __init__(
        self,
        model: Path,
        source: Launch[C] | Remote[C],
        *,
        max_context: int | None = None,
        load_timeout_s: float = 600.0,
        version: str = "local:0:0",
    ) -> None:
        config = load_config(model).get_text_config()
        own: int | None = getattr(config, "max_position_embeddings", None)
        if max_context is not None and not 2 <= max_context <= (own or max_context):
            raise ConfigError(f"max_context {max_context}: must lie in 2 to {own}, the model's own context")
        # Facts, context and capacity are known once the server runs.
        self.facts = EngineFacts(name=self.NAME, version="", dtype="")
        self.context_length: int = max_context or own or 0
        self.vocab_size: int = config.vocab_size
        self.capacity = 1
        self.job_by_job = False
        self._server = LocalServer(source, self.context_length) if isinstance(source, Launch) else RemoteServer(source)
        self._model_dtype = str(config.dtype).removeprefix("torch.")
        self._model = self._last_folder = Weights(model.absolute(), version)
        self._version = version
        self._load_timeout_s = load_timeout_s
        self.prompt_tokens = PromptTokens()
        self._eos_ids: frozenset[int] = frozenset()
        self._layout: dict[str, Stored] = {}
        self._optional: frozenset[str] = frozenset()
        self._flights: dict[asyncio.Task[Any], Flight] = {}
        self._deaths: dict[str, Deaths] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._changing = asyncio.Lock()
        """Held while weights are swapped and while the server is restarted."""
        self._supervisor: asyncio.Task[None] | None = None
        self._up = asyncio.Event()
        self._outage = "not started"
        self.num_starts = 0

    @property
    def version(self) -> str:
        return self._version

    @property
    def num_running(self) -> int:
        """Samples requested from the server, at most `capacity`; some may still wait for their first token."""
        return min(self.capacity, sum(flight.job.n for flight in self._flights.values()))

    @property
    def outage(self) -> str:
        return self._outage

    async def recovered(self) -> None:
        await self._up.wait()

    @property
    def _client(self) -> C:
        return self._server.client

    # -- the server's own ways ---------------------------------------------------------------------------------------

    @abstractmethod
    async def _admit(self) -> None:
        """Checks a server that has just started: it answers and has our plugin. Sets facts, context and capacity.
        Raises ConfigError."""

    @abstractmethod
    async def _serves(self, weights: Weights) -> bool:
        """Whether a server that has just started has these weights under this version."""

    @abstractmethod
    async def _ask(self, job: Job, request_ids: Sequence[str], *, urgent: bool) -> Answer: ...

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        await asyncio.to_thread(self._read_folder)
        await self._bring_up()
        self._supervisor = asyncio.create_task(self._supervise())

    def _read_folder(self) -> None:
        self._eos_ids = load_tokenizer(self._model.folder).eos_ids
        try:
            self._layout = read_layout(self._model.folder)
            self._optional = optional_tensors(self._model.folder)
        except WeightError as error:
            raise ConfigError(f"{error} (pickled weights are never read)") from None

    async def _bring_up(self) -> None:
        """Starts the server with `_last_folder` and checks it."""
        await self._server.start(*self._last_folder)
        try:
            await self._admit()
            if not await self._serves(self._last_folder):
                await self._replace(*self._last_folder)
        except BaseException:
            await self._server.stop()
            raise
        self._version = self._last_folder.version
        self.num_starts += 1
        self._outage = ""
        self._up.set()

    async def _supervise(self) -> None:
        while True:
            ends = [asyncio.create_task(self._server.ended()), asyncio.create_task(self._unresponsive())]
            try:
                done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancel(ends)
            self._outage = done.pop().result()
            self._up.clear()
            log.error("%s\nrestarting it with %s", self._outage, self._last_folder.version)
            async with self._changing:
                await self._start_again()
            log.warning("%s serves again with %s", self.TITLE, self._version)

    async def _start_again(self) -> None:
        delay = MIN_DELAY_S
        while True:
            try:
                return await self._bring_up()
            except Exception as error:  # a task boundary: nothing else would retry
                self._outage = f"{self.TITLE} cannot be restarted: {error}"
                expected = isinstance(error, DvpError)
                log.error("%s; next attempt in %g s", self._outage, delay, exc_info=None if expected else error)
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_DELAY_S)

    async def _unresponsive(self) -> str:
        failures = 0
        while failures < MAX_UNHEALTHY:
            await asyncio.sleep(HEALTH_EVERY_S)
            healthy = await self._client.is_healthy()
            # The server answers nothing while it reads weights.
            failures = 0 if healthy or self._changing.locked() else failures + 1
        return f"{self.TITLE} at {self._client.url} failed {failures} health checks in a row"

    async def close(self) -> None:
        supervisor, self._supervisor = self._supervisor, None
        self._outage = "closed"
        if supervisor is not None:
            await cancel([supervisor])
        await self._server.stop()
        for asking, flight in self._flights.items():
            asking.cancel()
            if isinstance(self._server, RemoteServer):
                self._in_background(self._abort(flight.request_ids))
        # A swap on a remote server runs to its end; without a server nothing below takes long.
        await asyncio.gather(*self._flights, *self._background, return_exceptions=True)
        await self._client.close()

    def _check_running(self) -> None:
        if self._supervisor is None:
            raise UnavailableError("the engine is not running: start it first, and do not use it after close")
        if self._outage:
            raise UnavailableError(f"{self.TITLE} is not running: {self._outage.splitlines()[0]}")

    # -- generation --------------------------------------------------------------------------------------------------

    async def generate(self, job: Job) -> tuple[Sample, ...]:
        return await self._generate(job, urgent=False)

    async def generate_first(self, job: Job) -> tuple[Sample, ...]:
        return await self._generate(job, urgent=True)

    async def _generate(self, job: Job, *, urgent: bool) -> tuple[Sample, ...]:
        self._check_running()
        check_fits(job, context_length=self.context_length, vocab_size=self.vocab_size)
        began = asyncio.get_running_loop().time()
        flight = Flight(job, [uuid4().hex for _ in range(job.n)])
        asking = asyncio.create_task(self._ask(job, flight.request_ids, urgent=urgent))
        self._flights[asking] = flight
        try:
            answer = await asking
        except asyncio.CancelledError:
            if self._supervisor is None:
                raise EngineError("the engine was closed") from None
            self._in_background(self._abort(flight.request_ids))
            raise
        except UnavailableError as error:
            if self._supervisor is None:
                raise EngineError("the engine was closed") from None
            raise self._suspected(job, began) or error from None
        finally:
            del self._flights[asking]
        self.prompt_tokens = self.prompt_tokens.plus(answer.prompt_tokens)
        return answer.samples

    def _suspected(self, job: Job, began: float) -> EngineError | None:
        """Counts a death of the server with `job` in flight. Returns the error that fails the job after MAX_DEATHS; it
        would otherwise be retried forever. Parts in flight together count once; parts that succeed reset nothing."""
        number, last_at = self._deaths.pop(job.job_id, Deaths(0, -math.inf))
        if began > last_at:
            number, last_at = number + 1, asyncio.get_running_loop().time()
        if number >= MAX_DEATHS:
            return EngineError(f"job {job.job_id}: {self.TITLE} died {number} times while this job was in flight")
        self._deaths[job.job_id] = Deaths(number, last_at)
        if len(self._deaths) > MAX_SUSPECTS:
            del self._deaths[next(iter(self._deaths))]
        return None

    async def _abort(self, request_ids: list[str]) -> None:
        with suppress(DvpError):  # a server that is down generates nothing
            await self._client.abort(request_ids)

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    # -- weights -----------------------------------------------------------------------------------------------------

    async def load(self, folder: Path, version: str) -> None:
        if holds_adapter(folder):
            raise WeightError(
                f"weight folder {folder}: it holds only an adapter, which only the transformers engine can merge; set "
                "lora.publish = 'merged' in the trainer"
            )
        self._check_running()
        await asyncio.to_thread(check_layout, folder, self._layout, self._optional)
        # A swap that has begun is finished even if the caller stops waiting, or the server would stay paused.
        await asyncio.shield(self._in_background(self._swap(folder, version)))

    async def _swap(self, folder: Path, version: str) -> None:
        async with self._changing:
            self._check_running()
            try:
                await self._replace(folder, version)
            except UnavailableError as error:
                raise WeightError(f"{self.TITLE} died while loading {folder}: {error}") from None
            self._last_folder, self._version = Weights(folder, version), version

    async def _replace(self, folder: Path, version: str) -> None:
        """Raises WeightError if the server refuses the folder; the last folder's weights are then in place again."""
        if refusal := await self._while_paused(lambda: self._client.load(folder, version, self._load_timeout_s)):
            raise WeightError(f"{self.TITLE} refused {folder}: {refusal}")

    async def _while_paused(self, change: Callable[[], Coroutine[Any, Any, str]]) -> str:
        """Changes weights. Returns why the server refused them, or ""; after a refusal it serves the last folder."""
        await self._client.pause()
        refusal = await change()
        if refusal:
            await self._put_back()
        await self._client.resume()
        return refusal

    async def _put_back(self) -> None:
        """Reloads the last folder, because the server may have loaded some of the weights that it refused."""
        refusal = await self._client.load(*self._last_folder, self._load_timeout_s)
        if refusal:
            await self._server.stop()
            raise WeightError(f"{self.TITLE} refused new weights, then the old ones, and is being restarted: {refusal}")
        await self._client.flush()
        self._version = self._last_folder.version
