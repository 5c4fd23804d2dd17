"""Putting jobs into the queue: the trainer's side (fenced) and the HTTP side (admission)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from services.contract.group import Group
from services.contract.job import Job, JobState

from .broker import Broker


class Submitted(StrEnum):
    """What became of one submitted job. Everything but NEW and REFUSED is the state of a job that existed already."""

    NEW = "new"
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    DEAD = "dead"
    REFUSED = "refused"
    """Not admitted: `limit` jobs are in flight, or the broker's memory is above 70 %. Submit again later."""


class JobReport(NamedTuple):
    state: JobState
    group: Group | None
    """Only for sink `client` and state done."""
    error: str | None


class Submission:
    """Submitting an id that exists is a no-op which returns its state: this is how a resumed trainer finds out, and why
    submitting everything outstanding again is always safe (after a wiped broker it is all NEW)."""

    def __init__(self, broker: Broker) -> None:
        raise NotImplementedError

    async def submit(self, jobs: Sequence[Job], *, fence: int, limit: int) -> list[Submitted]:
        """One outcome per job, in order. Sink `train` or `eval`; `limit` bounds the train jobs in flight and does not
        apply to `eval`. Raises LeaseLostError if another trainer took over."""
        raise NotImplementedError

    async def submit_client(self, job: Job, *, limit: int) -> Submitted:
        """Admits while fewer than `limit` jobs wait unread. Raises OverloadedError(reason, retry_after_s)."""
        raise NotImplementedError

    async def status(self, job_id: str) -> JobReport:
        """Raises NotFoundError for an id nobody submitted, or whose result has expired."""
        raise NotImplementedError
