"""Dead letters: jobs that were given up, and their replay and removal by an operator."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from dvp_rl.contract.errors import NotFoundError, RequestError
from dvp_rl.contract.group import DeadLetter
from dvp_rl.contract.job import Job, Sink

from .broker import Broker
from .entries import checked

PAGE = 64
"""Letters per script call, so that one call never holds the broker for long."""


class Prospect(StrEnum):
    """Whether a dead letter can be replayed, and if not, why."""

    OPEN = "open"
    """It can be replayed."""
    CLOSED = "closed"
    """The trainer has counted the job as dead and drawn the next prompt: nobody would train on the result."""
    AGAIN = "again"
    """A job with the same id has been submitted since."""
    NO_JOB = "no_job"
    """The letter holds no readable job."""


class Outcome(StrEnum):
    """Outcome of replaying or dropping one letter."""

    REPLAYED = "replayed"
    DROPPED = "dropped"
    GONE = "gone"
    """It was replayed or dropped before."""
    MEMORY = "memory"
    """The broker's memory, or the clients' share of it, is too full to admit jobs."""
    LARGE = "large"
    """Its result may exceed the share of all clients."""
    CLOSED = "closed"
    AGAIN = "again"
    NO_JOB = "no_job"


EXPLANATIONS = {
    Outcome.GONE: "replayed or dropped before",
    Outcome.MEMORY: "the broker's memory, or the clients' share of it, is too full to admit jobs; try again later",
    Outcome.LARGE: "its result may exceed the memory share of all clients: drop it",
    Outcome.CLOSED: "the trainer has counted it as dead and drawn the next prompt; nobody would train on it: drop it",
    Outcome.AGAIN: "a job with the same id was submitted since: drop it",
    Outcome.NO_JOB: "it holds no readable job: drop it",
}
"""Reasons why a letter was left alone."""


class Letter(NamedTuple):
    entry_id: str
    letter: DeadLetter
    job: Job | None
    """None if the letter holds no readable job."""
    prospect: Prospect


class DeadLetters:
    """Replays and drops dead letters. Every change is one script that checks each letter before it writes, so letters
    are neither lost nor duplicated by concurrent callers. Safe while the system runs."""

    def __init__(self, broker: Broker, *, by: str = "somebody") -> None:
        """`by`: author of the changes, for the audit."""
        self.broker = broker
        self._by = by

    async def page(self, count: int = PAGE, *, before: str | None = None) -> list[Letter]:
        """A page of letters, newest first. `before`: last entry id of the previous page."""
        return await self._read("XREVRANGE", "+" if before is None else f"({checked(before)}", "-", count)

    async def get(self, entry_id: str) -> Letter:
        """The letter. Raises NotFoundError."""
        found = await self._read("XRANGE", checked(entry_id), entry_id, 1)
        if not found:
            raise NotFoundError(f"no dead letter {entry_id}: {EXPLANATIONS[Outcome.GONE]}, or it never existed")
        return found[0]

    async def replay(self, letters: Sequence[Letter]) -> list[Outcome]:
        """Requeues each job as if it had never died: deliveries start from zero, and the tombstone for the trainer is
        withdrawn. A retry whose first reply was lost also gets REPLAYED."""
        jobs = [(entry_id, letter.job_id, job.max_bytes) for entry_id, letter, job, _ in letters if job is not None]
        answers = await self.broker.script("replay", self._by, *(part for job in jobs for part in job)) if jobs else []
        outcomes = iter([Outcome(answer.decode()) for answer in answers])
        return [Outcome.NO_JOB if letter.job is None else next(outcomes) for letter in letters]

    async def drop(self, entry_ids: Sequence[str]) -> list[Outcome]:
        """Deletes letters; tombstones for the trainer stay."""
        ids = [checked(entry_id) for entry_id in entry_ids]
        return (
            [Outcome(answer.decode()) for answer in await self.broker.script("discard", self._by, *ids)] if ids else []
        )

    async def pages(self) -> AsyncIterator[list[Letter]]:
        """Pages of all letters present at the start, oldest first, so that replayed jobs keep their order. Jobs that
        die meanwhile are not included."""
        start = "-"
        for newest in await self.page(1):
            while page := await self._read("XRANGE", start, newest.entry_id, PAGE):
                yield page
                start = f"({page[-1].entry_id}"

    async def _read(self, order: str, start: str, end: str, count: int) -> list[Letter]:
        found = await self.broker.script("letters", order, start, end, count)
        return [_letter(self.broker.run_id, *fields) for fields in found]


def _letter(run_id: str, entry_id: bytes, data: bytes, job: bytes, prospect: bytes) -> Letter:
    try:
        decoded = Job.from_bytes(job) if job else None
    except RequestError:
        decoded = None
    outlook = Prospect.NO_JOB if decoded is None else Prospect(prospect.decode())
    try:
        letter = DeadLetter.from_bytes(data)
    except RequestError as error:
        return Letter(entry_id.decode(), _unreadable(run_id, error), None, Prospect.NO_JOB)
    return Letter(entry_id.decode(), letter, decoded, outlook)


def _unreadable(run_id: str, error: RequestError) -> DeadLetter:
    """Stand-in for a letter that cannot be decoded."""
    return DeadLetter(
        job_id="",
        run_id=run_id,
        sink=Sink.TRAIN,
        error=f"not a letter: {error}",
        deliveries=0,
        replica_id="",
        died_at=0,
    )
