"""Jobs, groups and the two sides of the queue, for the tests of this folder."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from services.contract.group import EngineFacts, FinishReason, Group, Sample, VersionSpan
from services.contract.job import Job, Sink, job_id
from services.transport.broker import Broker
from services.transport.groups import GroupQueue
from services.transport.jobs import JobQueue, Lease
from services.transport.submission import Submission, Submitted

SHORT_LEASE_MS = 30
NO_LIMIT = 10**6
BLOCK_MS = 50

T = TypeVar("T")


def make_job(run_id: str, position: int = 0, *, sink: Sink = Sink.TRAIN, deadline: float | None = None) -> Job:
    name = job_id(run_id, position, 0) if sink is Sink.TRAIN else f"{sink}-{position}"
    return Job(job_id=name, run_id=run_id, prompt_ids=[1, 2, 3], n=2, sink=sink, deadline=deadline)


def make_group(job: Job, replica_id: str = "replica-0") -> Group:
    sample = Sample(
        token_ids=[5, 6],
        logprobs=[-0.5, -0.25],
        kept_mass=[1.0, 0.9],
        kept_count=[3, 4],
        finish_reason=FinishReason.STOP,
        versions=(VersionSpan(version=f"{job.run_id}:0:ab", start=0, end=2),),
        seed=7,
    )
    return Group(
        job_id=job.job_id,
        run_id=job.run_id,
        prompt_ids=job.prompt_ids,
        sampling=job.sampling,
        samples=(sample,) * job.n,
        sink=job.sink,
        replica_id=replica_id,
        engine=EngineFacts(name="fake", version="1", dtype="float32"),
    )


async def until(look: Callable[[], Awaitable[T]], timeout_s: float = 20.0) -> T:
    """The first true answer of `look`."""
    async with asyncio.timeout(timeout_s):
        while True:
            if answer := await look():
                return answer
            await asyncio.sleep(0.005)


@dataclass(frozen=True)
class Rig:
    """A trainer's and a client's end of one run's queue."""

    broker: Broker
    fence: int
    submission: Submission
    groups: GroupQueue

    @property
    def run_id(self) -> str:
        return self.broker.run_id

    def replica(self, name: str, *, lease_ms: int = 60_000, max_deliveries: int = 3) -> JobQueue:
        return JobQueue(self.broker, name, lease_ms=lease_ms, max_deliveries=max_deliveries)

    async def submit(self, count: int = 1, *, limit: int = NO_LIMIT, sink: Sink = Sink.TRAIN) -> list[Job]:
        jobs = [make_job(self.run_id, position, sink=sink) for position in range(count)]
        assert await self.submission.submit(jobs, fence=self.fence, limit=limit) == [Submitted.NEW] * count
        return jobs

    async def finish(self, replica: JobQueue, count: int) -> list[Lease]:
        """The replica runs `count` new jobs to their end."""
        leases = await replica.claim(count, BLOCK_MS)
        for lease in leases:
            await replica.commit(lease, make_group(lease.job, replica.replica_id))
        return leases

    async def length(self, stream: str) -> int:
        return int(await self.broker.redis.xlen(stream))

    async def counter(self, name: str) -> int:
        return int(await self.broker.redis.hget(self.broker.keys.counters, name) or 0)

    async def in_flight(self) -> set[str]:
        return {member.decode() for member in await self.broker.redis.smembers(self.broker.keys.in_flight)}

    async def uncheckpointed(self) -> set[str]:
        return {member.decode() for member in await self.broker.redis.smembers(self.broker.keys.uncheckpointed)}

    async def expired(self, replica: JobQueue, count: int = 8) -> list[Lease]:
        """What `replica` takes over as soon as the leases of others have run out."""
        return await until(lambda: replica.claim_expired(count))
