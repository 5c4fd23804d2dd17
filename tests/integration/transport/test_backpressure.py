"""Producers outrun consumers: the broker's memory stays bounded, admitted jobs end, nothing unread is lost."""

from __future__ import annotations

import asyncio

import numpy as np

from dvp_rl.cancellation import cancel
from dvp_rl.contract.errors import OverloadedError
from dvp_rl.contract.group import Group
from dvp_rl.contract.job import Job, JobState, Sink
from dvp_rl.transport.broker import MEMORY_SHARE, RESULT_SHARE, RETRY_AFTER_MEMORY_S, Broker
from dvp_rl.transport.dead_letters import DeadLetters
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.groups import GroupQueue
from dvp_rl.transport.jobs import Committed, JobQueue
from dvp_rl.transport.lease import TrainerLease
from dvp_rl.transport.submission import Submission
from tests.integration.transport.rig import BLOCK_MS, Rig
from tests.kit.records import make_group, make_job

MAXMEMORY = 24 * 1024 * 1024
PAD = "x" * 12_000
NUM_TOKENS = 20_000
"""Tokens per sample; a result is 27 times as large as its job."""
REFUSALS, PRODUCERS = 100, 4
TRAIN_LIMIT = 4


def large(job: Job) -> Group:
    group = make_group(job)
    ones = np.ones(NUM_TOKENS)
    arrays = {"token_ids": ones, "logprobs": -ones, "kept_mass": ones, "kept_count": ones}
    span = group.samples[0].versions[0].model_copy(update={"end": NUM_TOKENS})
    dtypes = {name: getattr(group.samples[0], name).dtype for name in arrays}
    update = {name: values.astype(dtypes[name]) for name, values in arrays.items()}
    sample = group.samples[0].model_copy(update={**update, "versions": (span,)})
    return group.model_copy(update={"samples": (sample,) * job.n})


class Flood:
    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.admitted: set[str] = set()
        self.reasons: set[tuple[str, float]] = set()
        self.outcomes: dict[str, Committed] = {}
        self.peak = 0

    async def produce(self, producer: int) -> None:
        """Submits jobs as fast as they are admitted, with hardly a pause after a refusal."""
        refused = number = 0
        while refused < REFUSALS:
            job = make_job(self.rig.run_id, number, sink=Sink.CLIENT)
            sampling = job.sampling.model_copy(update={"max_tokens": NUM_TOKENS})
            update = {"job_id": f"{producer}-{number}", "metadata": {"pad": PAD}, "sampling": sampling}
            job = job.model_copy(update=update)
            try:
                await self.rig.submission.submit_client(job, limit=10**9)
            except OverloadedError as error:
                self.reasons.add((str(error), error.retry_after_s))
                refused += 1
                await asyncio.sleep(0.001)
            else:
                self.admitted.add(job.job_id)
                number += 1

    async def serve(self, replica: JobQueue, settled: asyncio.Event) -> None:
        while True:
            leases = await replica.claim(8, BLOCK_MS)
            if not leases and settled.is_set():
                return
            for lease in leases:
                self.outcomes[lease.job.job_id] = await replica.commit(lease, large(lease.job))

    async def watch(self) -> None:
        while True:
            self.peak = max(self.peak, (await self.rig.broker.redis.info("memory"))["used_memory"])
            await asyncio.sleep(0.002)


async def test_clients_leave_the_trainer_its_memory_and_get_answers(own_broker: EmbeddedBroker, run_id: str) -> None:
    async with await Broker.connect(own_broker.url, run_id) as broker:
        await broker.redis.config_set("maxmemory", MAXMEMORY)
        fence = await TrainerLease(broker, "test").acquire()
        rig = Rig(broker, fence, Submission(broker), GroupQueue(broker, fence=fence))
        train = await rig.submit(TRAIN_LIMIT, limit=TRAIN_LIMIT)
        flood, settled = Flood(rig), asyncio.Event()
        watching = asyncio.create_task(flood.watch())
        async with asyncio.TaskGroup() as replicas:
            for clients in (False, True):
                replicas.create_task(flood.serve(rig.replica("a", clients=clients), settled))
            async with asyncio.TaskGroup() as producers:
                for producer in range(PRODUCERS):
                    producers.create_task(flood.produce(producer))
            settled.set()
        await cancel([watching])

        assert {retry_after_s for _, retry_after_s in flood.reasons} == {RETRY_AFTER_MEMORY_S}
        assert all(reason.startswith("clients' jobs and sessions use or have reserved") for reason, _ in flood.reasons)
        assert flood.peak < MEMORY_SHARE * MAXMEMORY, "the trainer's jobs would have been refused"
        # Every admitted job ended once, with its result.
        assert flood.outcomes.keys() == flood.admitted | {job.job_id for job in train}
        states = {id: (await rig.submission.status(id)).state for id in flood.admitted}
        assert set(states.values()) == {JobState.DONE}
        # The trainer's groups are unaffected and can all be read.
        assert {flood.outcomes[job.job_id] for job in train} == {Committed.COMMITTED}
        assert {delivery.job_id for delivery in await rig.groups.read(99, BLOCK_MS)} == {job.job_id for job in train}


async def test_a_job_whose_result_had_no_room_is_replayed(own_broker: EmbeddedBroker, run_id: str) -> None:
    async with await Broker.connect(own_broker.url, run_id) as broker:
        rig = Rig(broker, 0, Submission(broker), GroupQueue(broker, fence=0))
        job = make_job(run_id, sink=Sink.CLIENT)
        await rig.submission.submit_client(job, limit=9)
        replica = rig.replica("a", clients=True)
        (lease,) = await replica.claim(1, BLOCK_MS)
        used = (await broker.redis.info("memory"))["used_memory"]
        await broker.redis.config_set("maxmemory", int(used / (RESULT_SHARE + 0.1)))
        assert await replica.commit(lease, make_group(job)) is Committed.NO_ROOM
        report = await rig.submission.status(job.job_id)
        assert report.state is JobState.DEAD
        assert "no memory left for a result of" in str(report.error)
        await broker.redis.config_set("maxmemory", 0)
        await DeadLetters(broker).replay(await DeadLetters(broker).page())
        assert await rig.finish(replica, 1)
        assert (await rig.submission.status(job.job_id)).state is JobState.DONE
