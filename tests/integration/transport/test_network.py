"""The network between a process and the broker is cut, silent, slow, or loses replies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable

import pytest

from dvp_rl.contract.errors import LeaseLostError, UnavailableError
from dvp_rl.transport import broker as broker_module
from dvp_rl.transport import connection
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.groups import GroupQueue
from dvp_rl.transport.jobs import Committed, JobQueue
from dvp_rl.transport.lease import TrainerLease
from dvp_rl.transport.submission import Submission, Submitted
from tests.integration.transport.proxy import Network, Proxy
from tests.integration.transport.rig import BLOCK_MS, NO_LIMIT, SHORT_LEASE_MS, Rig
from tests.kit.records import make_group, make_job
from tests.kit.wait import WITHIN_S


@pytest.fixture
async def proxy(broker_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Proxy]:
    """A proxy whose clients retry quickly and for a long time."""
    monkeypatch.setattr(connection, "REPLY_TIMEOUT_S", 0.3)
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT_S", 0.3)
    monkeypatch.setattr(broker_module, "CALL_TIMEOUT_S", WITHIN_S)
    monkeypatch.setattr(connection, "NUM_RETRIES", 1000)
    async with Proxy(broker_url) as proxy:
        yield proxy


@pytest.fixture
async def far(proxy: Proxy, run_id: str) -> AsyncIterator[Broker]:
    """The broker at the other end of the network."""
    async with await Broker.connect(proxy.url, run_id) as broker:
        yield broker


def heal_later(proxy: Proxy) -> None:
    asyncio.get_running_loop().call_later(0.5, proxy.become, Network.FINE)


async def gives_up(call: Awaitable[object]) -> None:
    """Asserts that the call fails once its time is up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broker_module, "CALL_TIMEOUT_S", 1.0)
        with pytest.raises(UnavailableError, match="does not answer"):
            await call


@pytest.mark.parametrize("state", [Network.CUT, Network.SILENT, Network.DEAF])
async def test_every_wait_is_bounded(far: Broker, proxy: Proxy, state: Network) -> None:
    proxy.become(state)
    async with asyncio.timeout(WITHIN_S):
        await gives_up(far.ping())
    proxy.become(Network.FINE)
    await far.ping()


@pytest.mark.parametrize("state", [Network.CUT, Network.SILENT, Network.DEAF])
async def test_a_commit_through_an_outage_counts_once(rig: Rig, far: Broker, proxy: Proxy, state: Network) -> None:
    (job,) = await rig.submit()
    replica = JobQueue(far, "far")
    (lease,) = await replica.claim(1, BLOCK_MS)
    proxy.become(state)
    heal_later(proxy)
    assert await replica.commit(lease, make_group(job)) is Committed.COMMITTED
    assert await rig.counter("committed") == 1
    assert await rig.length(rig.broker.keys.groups) == 1


async def test_jobs_claimed_into_the_void_come_back_uncounted(rig: Rig, far: Broker, proxy: Proxy) -> None:
    await rig.submit()
    replica = JobQueue(far, "far", lease_ms=SHORT_LEASE_MS)
    proxy.become(Network.DEAF)
    heal_later(proxy)
    # The broker has assigned the job, but the reply was lost.
    leases = await replica.claim(1, BLOCK_MS)
    while not leases:
        leases = await replica.claim_expired(1) or await replica.claim(1, BLOCK_MS)
    assert leases[0].deliveries == 0
    assert await replica.commit(leases[0], make_group(leases[0].job)) is Committed.COMMITTED


async def test_a_submission_through_an_outage_counts_once(rig: Rig, far: Broker, proxy: Proxy) -> None:
    job = make_job(rig.run_id)
    proxy.become(Network.DEAF)
    heal_later(proxy)
    (outcome,) = await Submission(far).submit([job], fence=rig.fence, limit=NO_LIMIT)
    assert outcome in (Submitted.NEW, Submitted.QUEUED)
    assert await rig.length(rig.broker.keys.jobs) == 1
    assert await rig.counter("submitted") == 1


async def test_a_replica_cut_off_for_longer_than_its_lease_commits_nothing_twice(
    rig: Rig, far: Broker, proxy: Proxy
) -> None:
    (job,) = await rig.submit()
    cut_off, near = JobQueue(far, "far"), rig.replica("near", lease_ms=SHORT_LEASE_MS)
    (lease,) = await cut_off.claim(1, BLOCK_MS)
    proxy.become(Network.CUT)
    await gives_up(cut_off.renew([lease]))
    (taken,) = await rig.expired(near)
    await near.commit(taken, make_group(job, "near"))
    proxy.become(Network.FINE)
    assert await cut_off.renew([lease]) == [lease]
    with pytest.raises(LeaseLostError):
        await cut_off.commit(lease, make_group(job, "far"))
    (delivery,) = await rig.groups.read(9, BLOCK_MS)
    assert delivery.item.replica_id == "near"


async def test_a_trainer_cut_off_for_longer_than_its_lease_is_refused(rig: Rig, far: Broker, proxy: Proxy) -> None:
    jobs = await rig.submit(2)
    await rig.finish(rig.replica("a"), 2)
    groups = GroupQueue(far, fence=rig.fence)
    seen = await groups.read(9, BLOCK_MS)
    proxy.become(Network.SILENT)
    await gives_up(groups.acknowledge(seen))
    await rig.broker.redis.delete(rig.broker.keys.lease)  # expires
    fence = await TrainerLease(rig.broker, "next").acquire()
    proxy.become(Network.FINE)
    for attempt in (groups.acknowledge(seen), groups.settle(trained=[jobs[0].job_id]), groups.read(9, BLOCK_MS)):
        with pytest.raises(LeaseLostError):
            await attempt
    taken = await GroupQueue(rig.broker, fence=fence).read(9, BLOCK_MS)
    # The delayed acknowledgement arrived after the takeover, if at all, and changed nothing.
    assert [delivery.job_id for delivery in taken] == [job.job_id for job in jobs]


async def test_a_slow_network_is_only_slow(rig: Rig, far: Broker, proxy: Proxy) -> None:
    proxy.delay_s = 0.02
    jobs = await rig.submit(3)
    replica = JobQueue(far, "far")
    for lease in await replica.claim(3, BLOCK_MS):
        assert await replica.renew([lease]) == []
        assert await replica.commit(lease, make_group(lease.job)) is Committed.COMMITTED
    deliveries = await GroupQueue(far, fence=rig.fence).read(9, BLOCK_MS)
    assert [delivery.job_id for delivery in deliveries] == [job.job_id for job in jobs]


@pytest.mark.parametrize("hours", [-24, 24])
async def test_nobody_asks_a_replica_what_time_it_is(rig: Rig, monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    """Leases, fencing and deadlines use the broker's clock; waits use the monotonic clock."""
    seconds, _ = await rig.broker.redis.time()
    wanted = make_job(rig.run_id, 0, deadline=seconds + 60.0)
    unwanted = make_job(rig.run_id, 1, deadline=seconds - 1.0)
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + 3600 * hours)
    await rig.submission.submit([wanted, unwanted], fence=rig.fence, limit=NO_LIMIT)
    replica = rig.replica("lost in time")
    (lease,) = await replica.claim(2, BLOCK_MS)
    assert lease.job == wanted
    assert lease.overdue_at is not None
    assert 30 < lease.overdue_at - time.monotonic() <= 60
    assert await rig.replica("other").claim_expired(1) == []
    assert await replica.renew([lease]) == []
    assert await replica.commit(lease, make_group(wanted)) is Committed.COMMITTED
