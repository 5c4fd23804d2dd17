"""The two clients. They only differ in how they wait; requests, answers and retries are in calls.py and retry.py."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from functools import partial
from typing import Self, TypeVar, Unpack

import httpx
from pydantic import BaseModel

from dvp_rl.cancellation import finished, shielded
from dvp_rl.contract.errors import NotFoundError, UnavailableError
from dvp_rl.contract.http import Health, JobStatus, QueueHealth, RolloutResponse, WeightStatus
from dvp_rl.contract.job import JobState
from dvp_rl.loopback import is_loopback

from . import calls
from .calls import Call, JobFields, RolloutFields
from .retry import Attempts, Poll, Retry

R = TypeVar("R", bound=BaseModel)

BASE_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 30.0
LONG_TIMEOUT_S = 3600.0
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=100)
"""As many connections as there are calls: in a line for one, calls would time out while others generate."""


class _Base:
    """Settings, requests and answers of both clients.

    `timeout` bounds each short call, `long_timeout` a rollout or a weight reload. Every method raises the errors of
    dvp_rl.contract.errors: RequestError (also before anything is sent), NotFoundError, OverloadedError and
    UnavailableError after the last retry, EngineError, WeightError, ConfigError for a wrong token. A proxy that the
    environment names (HTTP_PROXY, ALL_PROXY, NO_PROXY) is used, except for a loopback address.
    """

    def __init__(
        self,
        base_url: str,
        token: str | None,
        timeout: float,
        long_timeout: float,
        retry: Retry | None,
    ) -> None:
        self._base_url = base_url
        self._is_here = is_loopback(httpx.URL(base_url).host)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout = timeout
        self._long_timeout = long_timeout
        self._retry = retry or Retry()

    def _request(self, http: httpx.Client | httpx.AsyncClient, call: Call[R]) -> httpx.Request:
        timeout = httpx.Timeout(self._timeout, read=self._long_timeout if call.long else self._timeout)
        headers = {"Idempotency-Key": call.key} if call.key else {}
        if call.num_retries:
            headers["X-Stainless-Retry-Count"] = str(call.num_retries)  # as OpenAI's clients do
        if call.body is None:
            return http.build_request(call.method, call.path, headers=headers, timeout=timeout)
        content = call.body.model_dump_json(exclude_unset=True)
        headers["Content-Type"] = "application/json"
        return http.build_request(call.method, call.path, content=content, headers=headers, timeout=timeout)

    def _answer(self, call: Call[R], outcome: httpx.Response | httpx.TransportError) -> R:
        if isinstance(outcome, httpx.TransportError):
            raise UnavailableError(f"{self._base_url}: {type(outcome).__name__}: {outcome}")
        return calls.parse(call, outcome)


class Client(_Base):
    """Blocking client: `with Client(url) as client:`. Threads may share it."""

    def __init__(
        self,
        base_url: str = BASE_URL,
        *,
        token: str | None = None,
        timeout: float = TIMEOUT_S,
        long_timeout: float = LONG_TIMEOUT_S,
        retry: Retry | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        super().__init__(base_url, token, timeout, long_timeout, retry)
        if transport is None and self._is_here:
            transport = httpx.HTTPTransport(limits=LIMITS)
        self._http = httpx.Client(base_url=base_url, headers=self._headers, limits=LIMITS, transport=transport)

    def rollout(self, **fields: Unpack[RolloutFields]) -> RolloutResponse:
        """Samples now, on the replica at base_url."""
        return self.send(calls.rollout(fields))

    def submit(self, **fields: Unpack[JobFields]) -> str:
        """Queues the job for any replica and returns its id. The same `job_id` again is a no-op."""
        return self.send(calls.submit(fields)).job_id

    def job(self, job_id: str) -> JobStatus:
        return self.send(calls.job(job_id))

    def wait(self, job_id: str, timeout: float = LONG_TIMEOUT_S) -> RolloutResponse:
        """The finished group, which the broker keeps until `delete`, or for an hour. Raises EngineError if the job
        died, UnavailableError after `timeout` seconds."""
        poll = Poll(job_id, timeout)
        while (group := calls.finished(self.job(job_id))) is None:
            time.sleep(poll.pause())
        return group

    def delete(self, job_id: str) -> JobState | None:
        """Deletes the result of a job, or cancels it. Returns the state that it had, or None if there is no such job,
        e.g. because an earlier attempt deleted it and its answer was lost."""
        with suppress(NotFoundError):
            return self.send(calls.delete(job_id)).status
        return None

    def queue(self) -> QueueHealth:
        return self.send(calls.queue())

    def weights(self) -> WeightStatus:
        return self.send(calls.weights())

    def reload_weights(self) -> WeightStatus:
        """Loads the newest announced version now. Raises WeightError if it cannot be loaded."""
        return self.send(calls.reload_weights())

    def ready(self) -> Health:
        """Raises UnavailableError that names what is missing while the replica is not ready."""
        return self.send(calls.ready())

    def send(self, call: Call[R]) -> R:
        attempts = Attempts(call, self._retry)
        while True:
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = self._http.send(self._request(self._http, call))
            except httpx.TransportError as error:
                outcome = error
            pause = attempts.pause_after(outcome)
            if pause is None:
                return self._answer(call, outcome)
            time.sleep(pause)
            call = call.again()

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient(_Base):
    """Client with the same methods, awaited: `async with AsyncClient(url) as client:`."""

    def __init__(
        self,
        base_url: str = BASE_URL,
        *,
        token: str | None = None,
        timeout: float = TIMEOUT_S,
        long_timeout: float = LONG_TIMEOUT_S,
        retry: Retry | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(base_url, token, timeout, long_timeout, retry)
        if transport is None and self._is_here:
            transport = httpx.AsyncHTTPTransport(limits=LIMITS)
        self._http = httpx.AsyncClient(base_url=base_url, headers=self._headers, limits=LIMITS, transport=transport)

    async def rollout(self, **fields: Unpack[RolloutFields]) -> RolloutResponse:
        """Cancelling the task disconnects, and the replica stops generating."""
        return await self.send(calls.rollout(fields))

    async def submit(self, **fields: Unpack[JobFields]) -> str:
        return (await self.send(calls.submit(fields))).job_id

    async def job(self, job_id: str) -> JobStatus:
        return await self.send(calls.job(job_id))

    async def wait(self, job_id: str, timeout: float = LONG_TIMEOUT_S) -> RolloutResponse:
        poll = Poll(job_id, timeout)
        while (group := calls.finished(await self.job(job_id))) is None:  # noqa: ASYNC110 - the event is elsewhere
            await asyncio.sleep(poll.pause())
        return group

    async def delete(self, job_id: str) -> JobState | None:
        with suppress(NotFoundError):
            return (await self.send(calls.delete(job_id))).status
        return None

    async def queue(self) -> QueueHealth:
        return await self.send(calls.queue())

    async def weights(self) -> WeightStatus:
        return await self.send(calls.weights())

    async def reload_weights(self) -> WeightStatus:
        return await self.send(calls.reload_weights())

    async def ready(self) -> Health:
        return await self.send(calls.ready())

    async def send(self, call: Call[R]) -> R:
        attempts = Attempts(call, self._retry)
        while True:
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = await shielded(partial(self._http.send, self._request(self._http, call)))
            except httpx.TransportError as error:
                outcome = error
            pause = attempts.pause_after(outcome)
            if pause is None:
                return self._answer(call, outcome)
            await asyncio.sleep(pause)
            call = call.again()

    async def close(self) -> None:
        await finished(self._http.aclose())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
