"""A replica's share for clients: their jobs and requests beside the trainer's jobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dvp_rl.contract.errors import EngineError
from dvp_rl.contract.group import Sample
from dvp_rl.contract.http import JobRequest, RolloutRequest, RolloutResponse
from dvp_rl.contract.job import Job, JobState, Sink
from dvp_rl.engines.fake import FakeEngine
from dvp_rl.logs import LogContext
from dvp_rl.rollout.replica import Replica
from dvp_rl.rollout.service import Service
from dvp_rl.rollout.settings import RolloutSettings
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.health import queue_health
from dvp_rl.transport.lease import TrainerLease
from dvp_rl.transport.submission import JobReport, Submission
from tests.kit.records import make_job
from tests.kit.wait import until_async

CAPACITY, SHARE = 8, 2


@dataclass(eq=False)
class Asked:
    """A job that the engine was asked for and has not answered."""

    job: Job
    may_end: asyncio.Event

    def end(self) -> None:
        self.may_end.set()


class Gate(FakeEngine):
    """An engine that finishes a job when the test says so."""

    divisible = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"service_time_s": 0})
        self.job_by_job = not self.divisible
        self.asked: list[Asked] = []

    async def generate(self, job: Job) -> tuple[Sample, ...]:
        asked = Asked(job, asyncio.Event())
        self.asked.append(asked)
        try:
            await asked.may_end.wait()
        finally:
            self.asked.remove(asked)
        if job.metadata.get("fails"):
            raise EngineError("boom")
        return await super().generate(job)

    def sizes(self, job_id: str) -> list[int]:
        return [asked.job.n for asked in self.asked if asked.job.job_id == job_id]


@dataclass(frozen=True)
class Running:
    service: Service
    engine: Gate
    broker: Broker

    @property
    def replica(self) -> Replica:
        return self.service.replica

    async def submit(self, name: str, n: int, **fields: object) -> Job:
        job = make_job(self.broker.run_id, n=n, sink=Sink.CLIENT).model_copy(update={"job_id": name, **fields})
        await Submission(self.broker).submit_client(job, limit=1000)
        return job

    async def train(self, fence: int, count: int, n: int) -> list[Job]:
        jobs = [make_job(self.broker.run_id, position, n=n) for position in range(count)]
        await Submission(self.broker).submit(jobs, fence=fence, limit=1000)
        return jobs

    async def asked(self, job_id: str, sizes: list[int]) -> None:
        await until_async(lambda: self.engine.sizes(job_id) == sizes)

    async def state(self, name: str) -> JobState:
        return (await Submission(self.broker).status(name)).state


@asynccontextmanager
async def serving(
    broker: Broker, broker_url: str, model: Path, monkeypatch: pytest.MonkeyPatch, *args: str
) -> AsyncIterator[Running]:
    """A whole replica; only its engine waits for the test."""
    monkeypatch.setattr("dvp_rl.engines.fake.FakeEngine", Gate)
    argv = ["--model", str(model), "--engine", "fake", "--redis-url", broker_url, "--run-id", broker.run_id]
    argv += ["--max-batch", str(CAPACITY), "--client-share", str(SHARE / CAPACITY), "--drain-s", "0", *args]
    service = Service(RolloutSettings.load(argv), LogContext())
    await service.start()
    engine = service.replica.engine
    assert isinstance(engine, Gate)
    try:
        yield Running(service, engine, broker)
    finally:
        await service.drain()
        await service.close()


Serve = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.fixture
def serve(broker: Broker, broker_url: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    return partial(serving, broker, broker_url, model, monkeypatch)


@pytest.fixture
async def fence(broker: Broker) -> AsyncIterator[int]:
    lease = TrainerLease(broker, "test")
    yield await lease.acquire()
    await lease.release()


async def test_a_large_job_of_a_client_leaves_training_its_slots(serve: Serve, fence: int) -> None:
    async with serve() as running:
        large = await running.submit("large", 20)
        await running.asked("large", [1] * SHARE)
        train = await running.train(fence, 9, n=2)
        # The slots that clients leave are the trainer's: three jobs of two samples, and no fourth one.
        for job in train[:3]:
            await running.asked(job.job_id, [2])
        assert running.replica.slots.in_flight == 20 + 6

        async def ends_within_its_share() -> bool:
            parts = [asked for asked in running.engine.asked if asked.job.job_id == "large"]
            assert len(parts) <= SHARE
            if len(parts) == SHARE:
                assert len(running.engine.asked) <= SHARE + 3
            for part in parts:
                part.end()
            return await running.state("large") is JobState.DONE

        await until_async(ends_within_its_share)
        group = await Submission(running.broker).result("large")
        # The same seeds, draws and order as if the job had not been divided.
        whole = FakeEngine(vocab_size=96, service_time_s=0)
        await whole.start()
        expected = await whole.generate(large)
        assert [sample.seed for sample in group.samples] == [sample.seed for sample in expected]
        assert [sample.token_ids.tolist() for sample in group.samples] == [s.token_ids.tolist() for s in expected]
        assert [len(running.engine.sizes(job.job_id)) for job in train[:3]] == [1] * 3


async def test_without_a_trainer_clients_have_the_whole_replica(serve: Serve) -> None:
    async with serve() as running:
        await running.submit("fits", CAPACITY)
        await running.asked("fits", [CAPACITY])
        running.engine.asked[0].end()
        await until_async(lambda: not running.engine.asked)
        await running.submit("larger", CAPACITY + 1)
        await running.asked("larger", [1] * CAPACITY)


async def test_a_replica_learns_of_a_trainer_at_its_start_and_by_its_heartbeats(serve: Serve, broker: Broker) -> None:
    lease = TrainerLease(broker, "test")
    await lease.acquire()
    async with serve() as running:
        assert running.replica.slots.trained
        await lease.release()
        await until_async(lambda: not running.replica.slots.trained)
        await lease.acquire()
        await until_async(lambda: running.replica.slots.trained)
        await lease.release()


@pytest.mark.usefixtures("fence")
async def test_requests_take_turns_with_a_large_job(serve: Serve) -> None:
    async with serve() as running:
        await running.submit("large", 20)
        await running.asked("large", [1] * SHARE)
        asking = asyncio.create_task(running.service.rollout(RolloutRequest(prompt_ids=[1, 2, 3])))
        await until_async(lambda: running.replica.slots.clients.requested == 1)
        # The job was first in line for the next free slot; after that it is behind the request.
        one, other = running.engine.asked
        one.end()
        await until_async(lambda: one not in running.engine.asked and running.engine.sizes("large") == [1, 1])
        other.end()
        await until_async(lambda: running.engine.sizes("large") == [1] and len(running.engine.asked) == SHARE)
        next(asked for asked in running.engine.asked if asked.job.job_id != "large").end()
        answer = b"".join([piece async for piece in await asking])
        assert len(RolloutResponse.model_validate_json(answer).samples) == 1


@pytest.mark.usefixtures("fence")
async def test_a_part_that_fails_ends_the_others_and_the_job(serve: Serve) -> None:
    async with serve("--max-deliveries", "1") as running:
        await running.submit("bad", 20, metadata={"fails": True})
        await running.asked("bad", [1] * SHARE)
        running.engine.asked[1].end()
        await until_async(lambda: not running.engine.asked)
        report = await until_async(lambda: ended(running, "bad"))
        assert (report.state, report.error) == (JobState.DEAD, "boom")
        assert running.replica.slots.clients.running == running.replica.slots.in_flight == 0


@pytest.mark.usefixtures("fence")
async def test_a_deleted_job_stops_in_all_its_parts(serve: Serve) -> None:
    async with serve("--lease-s", "0.5") as running:
        await running.submit("unwanted", 20)
        await running.asked("unwanted", [1] * SHARE)
        await Submission(running.broker).delete("unwanted")
        await until_async(lambda: not running.engine.asked)
        await until_async(lambda: running.replica.slots.in_flight == 0)
        assert running.replica.slots.clients.running == 0


@pytest.mark.usefixtures("fence")
async def test_a_job_stops_in_all_its_parts_when_its_deadline_passes(serve: Serve) -> None:
    async with serve("--lease-s", "0.5") as running:
        job_id = await running.service.submit(JobRequest(prompt_ids=[1, 2, 3], n=20, deadline_s=3600))
        await running.asked(job_id, [1] * SHARE)
        await running.broker.redis.zadd(running.broker.keys.client_deadlines, {job_id: 1}, xx=True)
        report = await until_async(lambda: ended(running, job_id))
        assert (report.state, report.error) == (JobState.DEAD, "its deadline passed before it was done")
        await until_async(lambda: not running.engine.asked)
        await until_async(lambda: running.replica.slots.in_flight == 0)
        assert running.replica.slots.clients.running == 0


@pytest.mark.usefixtures("fence")
async def test_an_engine_that_works_job_by_job_gets_one_undivided(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gate, "divisible", False)
    async with serve() as running:
        await running.submit("whole", 20)
        await running.asked("whole", [20])
        await running.submit("next", 1)
        assert (await running.service.queue()).client_jobs.pending == 1
        running.engine.asked[0].end()
        await running.asked("next", [1])


@pytest.mark.usefixtures("fence")
async def test_a_part_that_takes_too_long_is_an_error(serve: Serve) -> None:
    async with serve("--job-timeout-s", "0.2", "--max-deliveries", "1") as running:
        await running.submit("endless", 20)
        report = await until_async(lambda: ended(running, "endless"))
        assert "generation took longer than" in str(report.error)


async def test_a_request_does_not_stand_in_line_for_ever(serve: Serve) -> None:
    async with serve("--job-timeout-s", "0.2") as running:
        assert await running.replica.slots.clients.turn(CAPACITY) == CAPACITY
        with pytest.raises(EngineError, match="1 samples took longer than 0 s"):
            await running.service.rollout(RolloutRequest(prompt_ids=[1, 2, 3]))
        assert running.replica.slots.in_flight == 0


async def test_a_replica_that_stops_gives_back_the_jobs_of_both_sides(serve: Serve, fence: int) -> None:
    async with serve() as running:
        await running.submit("large", 20)
        await running.asked("large", [1] * SHARE)
        (train,) = await running.train(fence, 1, n=2)
        await running.asked(train.job_id, [2])
    health = await queue_health(running.broker)
    assert (health.jobs.backlog, health.jobs.pending) == (1, 0)
    assert (health.client_jobs.backlog, health.client_jobs.pending) == (1, 0)
    assert running.engine.asked == []


async def test_a_job_that_an_older_version_queued_among_the_trainers_takes_a_clients_turn(
    serve: Serve, broker: Broker, fence: int
) -> None:
    job = make_job(broker.run_id, n=20, sink=Sink.CLIENT)
    await Submission(broker).submit_client(job, limit=9)
    ((entry, fields),) = await broker.redis.xrange(broker.keys.client_jobs)
    await broker.redis.xdel(broker.keys.client_jobs, entry)
    await broker.redis.xadd(broker.keys.jobs, fields)
    async with serve() as running:
        await running.asked(job.job_id, [1] * SHARE)
        (train,) = await running.train(fence, 1, n=6)
        await running.asked(train.job_id, [6])
        assert running.replica.slots.training.held == 6


async def ended(running: Running, name: str) -> JobReport | None:
    report = await Submission(running.broker).status(name)
    return report if report.state in (JobState.DONE, JobState.DEAD) else None
