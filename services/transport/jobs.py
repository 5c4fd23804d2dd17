"""The replica's side of the jobs stream: claim, renew, commit, release, fail."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from services.contract.group import Group
from services.contract.job import Job

from .broker import Broker


@dataclass(frozen=True)
class Lease:
    """A job that this replica owns until the lease runs out without renewal."""

    entry_id: str
    job: Job
    deliveries: int
    """Deliveries that already ended in an engine error or an unclean death; 0 the first time."""


class Committed(StrEnum):
    COMMITTED = "committed"
    DUPLICATE = "duplicate"
    """The job had already ended otherwise; this result was thrown away and counted."""


class JobQueue:
    """One per replica process. The consumer name is the replica id plus a nonce per process, so that a restarted
    replica never takes its own earlier leases for live ones."""

    def __init__(self, broker: Broker, replica_id: str, *, lease_ms: int = 60_000, max_deliveries: int = 3) -> None:
        raise NotImplementedError

    async def claim(self, count: int, block_ms: int) -> list[Lease]:
        """Up to `count` new jobs; [] after `block_ms`. Undecodable jobs and jobs past their deadline are dead-lettered
        on the way and not returned."""
        raise NotImplementedError

    async def claim_expired(self, count: int) -> list[Lease]:
        """Takes over jobs whose lease ran out. Counts a delivery each; a job with too many becomes a dead letter."""
        raise NotImplementedError

    async def renew(self, leases: Iterable[Lease]) -> list[Lease]:
        """Restarts the lease time. Returns the leases that are lost: stop those and drop their results.
        Call at least every lease_ms / 3."""
        raise NotImplementedError

    async def commit(self, lease: Lease, group: Group) -> Committed:
        """Result, dedupe key and acknowledgement in one script. Raises LeaseLostError if the caller is not the owner."""
        raise NotImplementedError

    async def release(self, lease: Lease) -> None:
        """Gives the job back unfinished (graceful stop); not counted as a delivery. Raises LeaseLostError."""
        raise NotImplementedError

    async def fail(self, lease: Lease, error: str, *, fatal: bool = False) -> bool:
        """Reports an engine error: counted, and back to the queue or, when that was one too many or `fatal` (the job can
        never run, e.g. RequestError), to the dead letters. True if the job is dead. Raises LeaseLostError."""
        raise NotImplementedError

    async def close(self) -> None:
        """Graceful stop: releases whatever this consumer still owns and removes the consumer."""
        raise NotImplementedError
