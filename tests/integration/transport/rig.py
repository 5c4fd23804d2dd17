"""Jobs, groups and both sides of the queue, for the tests in this folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dvp_rl.contract.job import Job, Sink
from dvp_rl.contract.session import Ending, group_of
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.groups import GroupQueue
from dvp_rl.transport.jobs import JobQueue, Lease
from dvp_rl.transport.lease import TrainerLease
from dvp_rl.transport.sessions import Episode, SessionStore
from dvp_rl.transport.submission import Submission, Submitted
from tests.kit.records import make_episodes, make_group, make_job, make_turn
from tests.kit.wait import until_async

SHORT_LEASE_MS = 30
NO_LIMIT = 10**6
BLOCK_MS = 50
MOST_DELIVERIES = 3


@dataclass(frozen=True)
class Rig:
    """The trainer's and the clients' side of one run's queue, and factories of replicas."""

    broker: Broker
    fence: int
    submission: Submission
    groups: GroupQueue

    @classmethod
    async def of(cls, broker: Broker) -> Rig:
        fence = await TrainerLease(broker, "test").acquire()
        return cls(broker, fence, Submission(broker), GroupQueue(broker, fence=fence))

    @property
    def run_id(self) -> str:
        return self.broker.run_id

    def replica(self, name: str, *, clients: bool = False, lease_ms: int = 60_000, max_deliveries: int = 3) -> JobQueue:
        return JobQueue(self.broker, name, clients=clients, lease_ms=lease_ms, max_deliveries=max_deliveries)

    async def submit(self, count: int = 1, *, limit: int = NO_LIMIT, sink: Sink = Sink.TRAIN) -> list[Job]:
        jobs = [make_job(self.run_id, position, sink=sink) for position in range(count)]
        assert await self.submission.submit(jobs, fence=self.fence, limit=limit) == [Submitted.NEW] * count
        return jobs

    async def submit_episodes(self, position: int = 0, **fields: Any) -> Job:
        """A job that a harness plays, with `fields` of `make_episodes`."""
        job = make_episodes(self.run_id, position, **fields)
        assert await self.submission.submit([job], fence=self.fence, limit=NO_LIMIT) == [Submitted.NEW]
        return job

    async def finish(self, replica: JobQueue, count: int) -> list[Lease]:
        """Lets the replica claim and commit up to `count` new jobs; returns their leases."""
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
        """Leases that `replica` takes over as soon as others' leases have expired."""
        return await until_async(lambda: replica.claim_expired(count))


class Harness:
    """Takes, plays and finishes episodes as a replica does for a harness."""

    def __init__(self, broker: Broker, name: str = "") -> None:
        self.store, self.name = SessionStore(broker), name
        self._taken = 0

    async def take(self, session_id: str | None = None) -> Episode | None:
        self._taken += 1
        name = session_id or f"{self.name or 'session'}-{self._taken}"
        return await self.store.take(name, most_deliveries=MOST_DELIVERIES, caller=self.name)

    async def taken(self) -> Episode:
        episode = await until_async(self.take)
        assert episode is not None
        return episode

    async def say(self, episode: Episode, turn_id: str = "a", **fields: object) -> None:
        recorded = await self.store.read(episode.session_id, caller=self.name)
        parent = len(recorded.turns) - 1 if recorded.turns else None
        turn = make_turn(turn_id, parent=parent, run_id=self.store.broker.run_id, **fields)
        assert await self.store.append(recorded, turn, caller=self.name) == (len(recorded.turns), True)

    async def finish(self, episode: Episode, reward: float | None = 1.0, **said: Any) -> None:
        """`said`: more of an Ending."""
        ending = Ending(reward=reward, **said)
        recorded = await self.store.read(episode.session_id, caller=self.name)
        group = None
        if recorded.turns:
            group = group_of(recorded.session, recorded.turns, ending, recorded.job_id)
        assert await self.store.finish(recorded, ending, group, caller=self.name)

    async def play(self, episode: Episode, reward: float | None = 1.0, **fields: object) -> None:
        for turn_id in ("a", "b"):
            await self.say(episode, turn_id, **fields)
        await self.finish(episode, reward)
