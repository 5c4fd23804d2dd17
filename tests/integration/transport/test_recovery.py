"""The broker dies or is wiped, and trainer and replicas recover."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator

import pytest

from dvp_rl.contract.errors import LeaseLostError
from dvp_rl.contract.job import Sink
from dvp_rl.contract.keys import REPLICAS
from dvp_rl.contract.weights import Announcement
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.groups import Delivery, GroupQueue
from dvp_rl.transport.health import queue_health
from dvp_rl.transport.jobs import Committed
from dvp_rl.transport.lease import TrainerLease
from dvp_rl.transport.submission import Submission, Submitted
from dvp_rl.weights.registry import WeightRegistry
from tests.integration.transport.rig import BLOCK_MS, NO_LIMIT, Rig
from tests.kit.records import make_group, make_job
from tests.kit.wait import until_async


@pytest.fixture
async def lease(own_broker: EmbeddedBroker, run_id: str) -> AsyncIterator[TrainerLease]:
    async with await Broker.connect(own_broker.url, run_id) as broker:
        lease = TrainerLease(broker, "test")
        await lease.acquire()
        yield lease


@pytest.fixture
def rig(lease: TrainerLease) -> Rig:
    broker = lease.broker
    return Rig(broker, lease.token, Submission(broker), GroupQueue(broker, fence=lease.token))


def _wipe(broker: EmbeddedBroker) -> None:
    broker.kill()
    shutil.rmtree(broker.folder)
    broker.start()


async def test_a_killed_broker_with_aof_forgets_nothing(own_broker: EmbeddedBroker, rig: Rig) -> None:
    jobs = await rig.submit(4)
    replica = rig.replica("a")
    leases = await replica.claim(3, BLOCK_MS)
    await replica.commit(leases[0], make_group(leases[0].job))
    (delivery,) = await rig.groups.read(9, BLOCK_MS)
    await rig.groups.settle(trained=[delivery.job_id])
    own_broker.kill()
    own_broker.start()
    assert await replica.renew(leases[1:]) == []
    assert await replica.commit(leases[1], make_group(leases[1].job)) is Committed.COMMITTED
    assert await replica.commit(leases[1], make_group(leases[1].job)) is Committed.COMMITTED
    states = await rig.submission.submit(jobs, fence=rig.fence, limit=NO_LIMIT)
    assert states == [Submitted.DONE, Submitted.DONE, Submitted.RUNNING, Submitted.QUEUED]
    assert await rig.in_flight() == {job.job_id for job in jobs[1:]}
    (second,) = await rig.groups.read(9, BLOCK_MS)
    await rig.groups.acknowledge([delivery, second])
    assert await rig.length(rig.broker.keys.groups) == 0


async def test_nobody_loses_a_lease_because_the_broker_was_away(own_broker: EmbeddedBroker, rig: Rig) -> None:
    await rig.submit(1)
    # The lease has expired when the broker is back, but the broker has been up for less than one lease time.
    owner, other = rig.replica("owner", lease_ms=60_000), rig.replica("other", lease_ms=60_000)
    (lease,) = await owner.claim(1, BLOCK_MS)
    await rig.broker.redis.xclaim(rig.broker.keys.jobs, REPLICAS, owner.consumer, 0, [lease.entry_id], idle=90_000)
    own_broker.kill()
    own_broker.start()
    assert await other.claim_expired(1) == []
    assert await owner.renew([lease]) == []
    assert await owner.commit(lease, make_group(lease.job)) is Committed.COMMITTED


async def test_a_wiped_broker_costs_only_time(own_broker: EmbeddedBroker, rig: Rig, lease: TrainerLease) -> None:
    jobs = await rig.submit(3)
    replica = rig.replica("a")
    before = await replica.claim(1, BLOCK_MS)
    _wipe(own_broker)
    # Running jobs are lost, and their owner is told so.
    assert await replica.renew(before) == before
    with pytest.raises(LeaseLostError):
        await replica.commit(before[0], make_group(before[0].job))
    assert await replica.claim_expired(4) == []
    assert await replica.claim(1, 1) == []
    assert await rig.groups.read(1, 1) == []
    # The trainer keeps its place and submits outstanding jobs again.
    await lease.renew()
    assert await rig.submission.submit(jobs, fence=rig.fence, limit=3) == [Submitted.NEW] * 3
    await rig.finish(replica, 3)
    seen: list[Delivery] = await until_async(lambda: rig.groups.read(9, BLOCK_MS))
    assert [delivery.job_id for delivery in seen] == [job.job_id for job in jobs]
    await rig.groups.settle(trained=[job.job_id for job in jobs])
    await rig.groups.acknowledge(seen)
    health = await queue_health(rig.broker)
    assert (health.in_flight, health.uncheckpointed, health.dead) == (0, 0, 0)


async def test_a_resumed_trainer_on_a_wiped_broker(own_broker: EmbeddedBroker, rig: Rig) -> None:
    jobs = await rig.submit(3)
    _wipe(own_broker)
    fence = await TrainerLease(rig.broker, "resumed").acquire()
    assert fence > rig.fence
    groups = GroupQueue(rig.broker, fence=fence)
    await groups.restore([job.job_id for job in jobs])
    # The set already counts them, so the limit does not keep them out.
    assert await rig.submission.submit(jobs, fence=fence, limit=3) == [Submitted.NEW] * 3
    more = make_job(rig.run_id, 9)
    assert await rig.submission.submit([more], fence=fence, limit=3) == [Submitted.REFUSED]
    with pytest.raises(LeaseLostError):
        await rig.submission.submit(jobs, fence=rig.fence, limit=3)


async def test_the_first_trainer_after_a_wipe_keeps_the_others_out(own_broker: EmbeddedBroker, rig: Rig) -> None:
    _wipe(own_broker)
    (job,) = await rig.submit()
    with pytest.raises(LeaseLostError):
        await rig.submission.submit([job], fence=rig.fence - 1, limit=9)


async def test_weights_are_announced_again_after_a_wipe(own_broker: EmbeddedBroker, rig: Rig) -> None:
    registry = WeightRegistry(rig.broker)
    assert await registry.next_seq(fence=rig.fence) == 1
    announcement = Announcement(version=f"{rig.run_id}:1:ab", step=1, folder="/w", announced_at=1.0)
    await registry.announce(announcement, fence=rig.fence)
    _wipe(own_broker)
    assert await registry.latest() is None
    assert await registry.next_seq(fence=rig.fence, at_least=1) == 2


async def test_a_blocked_claim_survives_a_wipe(own_broker: EmbeddedBroker, rig: Rig) -> None:
    replica = rig.replica("a")
    waiting = asyncio.create_task(replica.claim(1, 5_000))
    await until_async(lambda: _blocked(rig.broker))
    await rig.broker.redis.flushdb()  # the server belongs to this test
    assert await waiting == []
    await rig.submission.submit([make_job(rig.run_id)], fence=rig.fence, limit=1)
    assert len(await replica.claim(1, BLOCK_MS)) == 1


async def _blocked(broker: Broker) -> bool:
    return bool((await broker.redis.info("clients"))["blocked_clients"])


async def test_a_client_that_waits_is_told_after_a_wipe(own_broker: EmbeddedBroker, rig: Rig) -> None:
    job = make_job(rig.run_id, sink=Sink.CLIENT)
    await rig.submission.submit_client(job, limit=1)
    _wipe(own_broker)
    assert await rig.submission.submit_client(job, limit=1) is Submitted.NEW
