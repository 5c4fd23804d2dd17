"""The replica's side of a stream of jobs: claim, renew, commit, release, fail."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dvp_rl.contract.errors import LeaseLostError, RequestError
from dvp_rl.contract.group import Group
from dvp_rl.contract.job import Job
from dvp_rl.contract.keys import REPLICAS

from .broker import Broker

logger = logging.getLogger(__name__)

MAX_ERROR_CHARS = 2_000


@dataclass(frozen=True)
class Lease:
    """A job that this replica owns until the lease runs out without renewal."""

    entry_id: str
    job: Job
    deliveries: int
    """Deliveries that already ended in an engine error or an unclean death; 0 the first time."""
    overdue_at: float | None = None
    """The job's deadline on this process's monotonic clock, converted with the broker's clock: wall clocks differ and
    jump."""


class Committed(StrEnum):
    COMMITTED = "committed"
    DUPLICATE = "duplicate"
    """The job had already ended; this result was discarded and counted."""
    NO_ROOM = "no_room"
    """The broker's memory is full: a client's job became a dead letter, which can be replayed once there is room."""


class JobQueue:
    """Jobs as one replica sees them; a replica process has one queue for the trainer's jobs and one for clients'. The
    consumer name is the replica id plus a nonce, so that a restarted replica never takes its earlier leases for live
    ones. `lease_ms` must be equal in all replicas of a run: the replica that looks decides when a lease has expired."""

    def __init__(
        self,
        broker: Broker,
        replica_id: str,
        *,
        clients: bool = False,
        lease_ms: int = 60_000,
        max_deliveries: int = 3,
    ) -> None:
        self.broker = broker
        self.stream = broker.keys.client_jobs if clients else broker.keys.jobs
        self.replica_id = replica_id
        self.consumer = f"{replica_id}/{secrets.token_hex(4)}"
        self.lease_ms = lease_ms
        self.max_deliveries = max_deliveries
        self._held: set[str] = set()

    async def claim(self, count: int, block_ms: int) -> list[Lease]:
        """Up to `count` new jobs; [] after `block_ms`. Undecodable jobs and jobs past `Job.deadline` become dead
        letters. Neither they nor overdue jobs of clients are returned."""
        entries = await self.broker.read_group(self.stream, REPLICAS, self.consumer, count, block_ms)
        return await self._start([(entry_id, fields.get(b"data", b"")) for entry_id, fields in entries])

    async def claim_expired(self, count: int) -> list[Lease]:
        """Takes over jobs whose lease expired; counts a delivery each. A job with too many becomes a dead letter."""
        taken = await self._script("expire", self.lease_ms, count, self.max_deliveries, *self._held)
        for _, job_id, _, holder in taken:
            replica_id, _, _ = holder.decode().rpartition("/")
            reason = "died or hangs" if holder.decode() != self.consumer else "is this one, which never got the reply"
            logger.warning("taking over job %s: replica %s %s", job_id.decode(), replica_id, reason)
        return await self._start([(entry_id.decode(), data) for entry_id, _, data, _ in taken])

    async def _start(self, entries: Sequence[tuple[str, bytes]]) -> list[Lease]:
        jobs = {entry_id: job for entry_id, data in entries if (job := await self._decode(entry_id, data))}
        if not jobs:
            return []
        triples = [(entry_id, job.job_id, job.deadline or "") for entry_id, job in jobs.items()]
        answers = await self._script("start", self.replica_id, *(x for three in triples for x in three))
        now = time.monotonic()
        leases = [
            Lease(entry_id, job, deliveries, None if job.deadline is None else now + left_ms / 1000)
            for (entry_id, job), (deliveries, left_ms) in zip(jobs.items(), answers, strict=True)
            if deliveries >= 0
        ]
        self._held.update(lease.entry_id for lease in leases)
        return leases

    async def _decode(self, entry_id: str, data: bytes) -> Job | None:
        try:
            job = Job.from_bytes(data)
            if job.run_id != self.broker.run_id:
                raise RequestError(f"Job: run_id: {job.run_id!r}, this replica serves {self.broker.run_id!r}")
        except RequestError as error:
            logger.warning("entry %s is not a job: %s", entry_id, error)
            await self._fail(entry_id, f"not a job: {error}", fatal=True)
            return None
        return job

    async def renew(self, leases: Iterable[Lease]) -> list[Lease]:
        """Renews leases and returns those that are lost: the caller must stop these jobs and drop their results. Call
        at least every lease_ms / 3."""
        by_entry = {lease.entry_id: lease for lease in leases}
        if not by_entry:
            return []
        lost = [entry_id.decode() for entry_id in await self._script("renew", *by_entry)]
        self._held.difference_update(lost)
        return [by_entry[entry_id] for entry_id in lost]

    async def commit(self, lease: Lease, group: Group) -> Committed:
        """Stores result and dedupe key and acknowledges the entry, in one script. Raises LeaseLostError if the caller
        is not the owner, RequestError if the group does not answer the job."""
        job = lease.job
        n = len(group.episodes)
        if (group.job_id, group.run_id, group.sink, n) != (job.job_id, job.run_id, job.sink, job.n):
            raise RequestError(
                f"group of job {group.job_id!r} with n = {n} does not answer job {job.job_id!r} with n = {job.n}"
            )
        try:
            reply = await self._script("commit", lease.entry_id, job.job_id, job.sink, group.to_bytes())
        except LeaseLostError:
            self._held.discard(lease.entry_id)
            raise
        self._held.discard(lease.entry_id)
        return Committed(reply.decode())

    def forget(self, lease: Lease) -> None:
        """Stops protecting a lease: once expired it goes to any replica that asks, this one included."""
        self._held.discard(lease.entry_id)

    async def release(self, lease: Lease) -> None:
        """Returns an unfinished job to the queue (graceful stop); not counted as a delivery. Raises LeaseLostError."""
        self._held.discard(lease.entry_id)
        await self._script("release", lease.entry_id)

    async def fail(self, lease: Lease, error: str, *, fatal: bool = False) -> bool:
        """Reports an engine error and counts it. The job is requeued or, after too many deliveries or if `fatal`
        (it can never run, e.g. RequestError), becomes a dead letter. True if the job is dead. Raises LeaseLostError."""
        self._held.discard(lease.entry_id)
        return await self._fail(lease.entry_id, error, fatal=fatal)

    async def _fail(self, entry_id: str, error: str, *, fatal: bool) -> bool:
        most = 0 if fatal else self.max_deliveries
        message = error[:MAX_ERROR_CHARS]
        return bool(await self._script("fail", entry_id, message, most, self.replica_id))

    async def close(self) -> None:
        """Stops gracefully: releases everything this consumer still owns and removes the consumer."""
        self._held.clear()
        await self._script("abandon")

    async def _script(self, name: str, *args: str | bytes | int | float) -> Any:
        return await self.broker.script(name, self.stream, self.consumer, *args)
