"""Putting jobs into the queue: the trainer's side (fenced) and the HTTP side (admission)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from services.contract.errors import NotFoundError, OverloadedError, RequestError
from services.contract.group import Group
from services.contract.job import Job, JobState, Sink, own_prefix

from .broker import MEMORY_SHARE, RETRY_AFTER_MEMORY_S, Broker

RETRY_AFTER_BACKLOG_S = 2.0
RETRY_AFTER_CLOSED_S = 30.0
BATCH = 64
"""Jobs per script call, so that one call never holds the broker for long."""


class Submitted(StrEnum):
    """What became of one submitted job. Everything but NEW and REFUSED is the state of a job that existed already."""

    NEW = "new"
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    DEAD = "dead"
    REFUSED = "refused"
    """Not admitted: `limit` jobs are in flight, the broker's memory is above 70 %, or the queue is closed. Submit again
    later."""


class JobReport(NamedTuple):
    state: JobState
    group: Group | None
    """Only for sink `client` and state done."""
    error: str | None


class Submission:
    """Submitting an id that exists is a no-op which returns its state: this is how a resumed trainer finds out, and why
    submitting everything outstanding again is always safe (after a wiped broker it is all NEW)."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker

    async def submit(self, jobs: Sequence[Job], *, fence: int, limit: int) -> list[Submitted]:
        """One outcome per job, in order. Sink `train` or `eval`; `limit` bounds the train jobs in flight and does not
        apply to `eval`. Raises LeaseLostError if another trainer took over."""
        for job in jobs:
            self._check(job, Sink.TRAIN, Sink.EVAL)
        outcomes: list[Submitted] = []
        for start in range(0, len(jobs), BATCH):
            outcomes += await self._submit(jobs[start : start + BATCH], fence, limit)
        return outcomes

    async def _submit(self, jobs: Sequence[Job], fence: int, limit: int) -> list[Submitted]:
        triples = [(job.job_id, job.sink, job.to_bytes()) for job in jobs]
        try:
            reply = await self.broker.script("submit", fence, limit, *(x for three in triples for x in three))
        except OverloadedError:
            return [Submitted.REFUSED] * len(jobs)
        return [Submitted(outcome.decode()) for outcome in reply]

    async def submit_client(self, job: Job, *, limit: int) -> Submitted:
        """Admits while fewer than `limit` jobs wait unread. Raises OverloadedError(reason, retry_after_s)."""
        self._check(job, Sink.CLIENT)
        reply = (await self.broker.script("submit_client", job.job_id, job.to_bytes(), limit)).decode()
        if reply == "backlog":
            raise OverloadedError(f"{limit} jobs already wait for a replica", RETRY_AFTER_BACKLOG_S)
        if reply == "closed":
            raise OverloadedError("the queue is being drained: no new jobs until dvp-queue open", RETRY_AFTER_CLOSED_S)
        if reply == "memory":
            raise OverloadedError(f"the broker's memory is {MEMORY_SHARE:.0%} full", RETRY_AFTER_MEMORY_S)
        return Submitted(reply)

    def _check(self, job: Job, *sinks: Sink) -> None:
        if job.sink is Sink.CLIENT and job.job_id.startswith(own := own_prefix(job.run_id)):
            allowed = f"any that does not begin with {own!r}, as the trainer's do"
            error: dict[str, object] = {"field": "job_id", "value": job.job_id, "allowed": allowed}
            raise RequestError(f"job_id: got {job.job_id!r}, allowed: {allowed}", [error])
        if job.run_id != self.broker.run_id:
            raise RequestError(f"run_id: {job.run_id!r}, this queue belongs to run {self.broker.run_id!r}")
        if job.sink not in sinks:
            raise RequestError(f"sink: {job.sink!r}, allowed here: {', '.join(sinks)}")

    async def status(self, job_id: str) -> JobReport:
        """Raises NotFoundError for an id nobody submitted, or whose result has expired."""
        redis, keys = self.broker.redis, self.broker.keys
        result: Any = None
        async with self.broker.call():
            stored: Any = await redis.hgetall(keys.job(job_id))
            fields = {name.decode(): value.decode() for name, value in stored.items()}
            wants_result = fields.get("sink") == Sink.CLIENT and fields.get("state") == JobState.DONE
            if wants_result:
                result = await redis.get(keys.result(job_id))
        if "state" not in fields or (wants_result and result is None):
            raise NotFoundError(f"job {job_id!r}: never submitted, or ended more than an hour ago")
        group = None if result is None else Group.from_bytes(result)
        return JobReport(JobState(fields["state"]), group, fields.get("error"))
