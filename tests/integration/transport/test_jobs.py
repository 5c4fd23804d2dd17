"""The replica's side: a job ends exactly once, whichever process dies at any time."""

from __future__ import annotations

import time

import pytest

from dvp_rl.contract.errors import LeaseLostError, RequestError
from dvp_rl.contract.group import DeadLetter, Group
from dvp_rl.contract.job import JobState, Sink
from dvp_rl.contract.keys import REPLICAS
from dvp_rl.transport.jobs import Committed
from dvp_rl.transport.submission import Submitted
from tests.integration.transport.rig import BLOCK_MS, NO_LIMIT, SHORT_LEASE_MS, Rig
from tests.kit.records import make_group, make_job
from tests.kit.wait import until_async


async def test_a_job_becomes_a_group(rig: Rig) -> None:
    (job,) = await rig.submit()
    replica = rig.replica("a")
    (lease,) = await replica.claim(4, BLOCK_MS)
    assert lease.job == job
    assert lease.deliveries == 0
    assert (await rig.submission.status(job.job_id)).state is JobState.RUNNING
    group = make_group(job)
    assert await replica.commit(lease, group) is Committed.COMMITTED
    assert await rig.length(rig.broker.keys.jobs) == 0
    (delivery,) = await rig.groups.read(4, BLOCK_MS)
    assert delivery.item == group
    assert (await rig.submission.status(job.job_id)).state is JobState.DONE


async def test_claims_never_overlap(rig: Rig) -> None:
    await rig.submit(10)
    a, b = rig.replica("a"), rig.replica("b")
    taken = [lease.job.job_id for replica in (a, b, a, b) for lease in await replica.claim(3, BLOCK_MS)]
    assert len(taken) == len(set(taken)) == 10


async def test_claim_returns_nothing_after_the_wait(rig: Rig) -> None:
    assert await rig.replica("a").claim(1, 1) == []


async def test_a_retried_commit_is_told_the_same(rig: Rig) -> None:
    await rig.submit()
    replica = rig.replica("a")
    (lease,) = await replica.claim(1, BLOCK_MS)
    for _ in range(3):
        assert await replica.commit(lease, make_group(lease.job)) is Committed.COMMITTED
    assert await rig.length(rig.broker.keys.groups) == 1
    assert await rig.counter("committed") == 1


async def test_a_late_commit_after_the_lease_was_taken_changes_nothing(rig: Rig) -> None:
    await rig.submit()
    hung, other = rig.replica("hung", lease_ms=SHORT_LEASE_MS), rig.replica("other", lease_ms=SHORT_LEASE_MS)
    (old,) = await hung.claim(1, BLOCK_MS)
    (new,) = await rig.expired(other)
    assert new.deliveries == 1
    with pytest.raises(LeaseLostError, match=old.entry_id):
        await hung.commit(old, make_group(old.job, "hung"))
    assert await rig.length(rig.broker.keys.groups) == 0
    assert await other.commit(new, make_group(new.job, "other")) is Committed.COMMITTED
    with pytest.raises(LeaseLostError):
        await hung.commit(old, make_group(old.job, "hung"))
    (delivery,) = await rig.groups.read(9, BLOCK_MS)
    assert isinstance(delivery.item, Group)
    assert delivery.item.replica_id == "other"


async def test_a_late_renewal_does_not_steal_the_lease_back(rig: Rig) -> None:
    await rig.submit()
    hung, other = rig.replica("hung", lease_ms=SHORT_LEASE_MS), rig.replica("other", lease_ms=SHORT_LEASE_MS)
    (old,) = await hung.claim(1, BLOCK_MS)
    (new,) = await rig.expired(other)
    assert await hung.renew([old]) == [old]
    assert await other.renew([new]) == []
    assert await other.commit(new, make_group(new.job)) is Committed.COMMITTED


async def test_a_replica_stopped_before_it_starts_does_not_start_late(rig: Rig) -> None:
    (job,) = await rig.submit()
    hung, other = rig.replica("hung", lease_ms=SHORT_LEASE_MS), rig.replica("other", lease_ms=SHORT_LEASE_MS)
    ((entry_id, _),) = await rig.broker.read_group(rig.broker.keys.jobs, REPLICAS, hung.consumer, 1, BLOCK_MS)
    await rig.expired(other)
    assert await hung._script("start", "hung", entry_id, job.job_id, "") == [[-1, 0]]


@pytest.mark.parametrize("call", ["release", "fail"])
async def test_only_the_owner_gives_back(rig: Rig, call: str) -> None:
    await rig.submit()
    hung, other = rig.replica("hung", lease_ms=SHORT_LEASE_MS), rig.replica("other", lease_ms=SHORT_LEASE_MS)
    (old,) = await hung.claim(1, BLOCK_MS)
    (new,) = await rig.expired(other)
    with pytest.raises(LeaseLostError):
        await (hung.release(old) if call == "release" else hung.fail(old, "boom"))
    assert await other.renew([new]) == []
    assert await rig.length(rig.broker.keys.jobs) == 1


async def test_a_renewed_lease_does_not_run_out(rig: Rig) -> None:
    await rig.submit(2)
    owner, other = rig.replica("owner", lease_ms=3000), rig.replica("other", lease_ms=3000)
    kept, forgotten = await owner.claim(2, BLOCK_MS)

    async def other_takes() -> list[str]:
        assert await owner.renew([kept]) == []
        return [lease.entry_id for lease in await other.claim_expired(8)]

    assert await until_async(other_takes) == [forgotten.entry_id]


async def test_own_live_leases_are_not_taken_over(rig: Rig) -> None:
    await rig.submit(2)
    owner, dead = rig.replica("owner", lease_ms=1), rig.replica("dead", lease_ms=1)
    (mine,) = await owner.claim(1, BLOCK_MS)
    (theirs,) = await dead.claim(1, BLOCK_MS)
    assert [lease.entry_id for lease in await rig.expired(owner, 1)] == [theirs.entry_id]
    assert mine.entry_id != theirs.entry_id


async def test_a_reply_lost_on_the_network_is_claimed_again_and_not_counted(rig: Rig) -> None:
    await rig.submit()
    replica = rig.replica("a", lease_ms=SHORT_LEASE_MS)
    await rig.broker.read_group(rig.broker.keys.jobs, REPLICAS, replica.consumer, 1, BLOCK_MS)
    (lease,) = await rig.expired(replica)
    assert lease.deliveries == 0


async def test_a_restarted_replica_is_another_consumer(rig: Rig) -> None:
    await rig.submit()
    before, after = rig.replica("same", lease_ms=SHORT_LEASE_MS), rig.replica("same", lease_ms=SHORT_LEASE_MS)
    (old,) = await before.claim(1, BLOCK_MS)
    (new,) = await rig.expired(after)
    with pytest.raises(LeaseLostError):
        await before.commit(old, make_group(old.job))
    assert await after.commit(new, make_group(new.job)) is Committed.COMMITTED


async def test_releases_do_not_count_and_the_job_keeps_its_age(rig: Rig) -> None:
    (job,) = await rig.submit()
    replica = rig.replica("a", max_deliveries=1)
    for _ in range(5):
        (lease,) = await replica.claim(1, BLOCK_MS)
        assert (lease.job, lease.deliveries) == (job, 0)
        (before,) = await rig.broker.redis.xrange(rig.broker.keys.jobs)
        await replica.release(lease)
        (after,) = await rig.broker.redis.xrange(rig.broker.keys.jobs)
        assert after[1][b"at"] == before[1][b"at"]
        assert (await rig.submission.status(job.job_id)).state is JobState.QUEUED


async def test_failures_count_until_the_job_is_dead(rig: Rig) -> None:
    (job,) = await rig.submit()
    replica = rig.replica("a", max_deliveries=3)
    fates = []
    for counted in range(3):
        (lease,) = await replica.claim(1, BLOCK_MS)
        assert lease.deliveries == counted
        fates.append(await replica.fail(lease, f"boom {counted}"))
    assert fates == [False, False, True]
    (delivery,) = await rig.groups.read(9, BLOCK_MS)
    assert isinstance(delivery.item, DeadLetter)
    assert (delivery.item.error, delivery.item.deliveries, delivery.item.replica_id) == ("boom 2", 3, "a")
    assert await rig.in_flight() == set()
    assert (await rig.submission.status(job.job_id)).error == "boom 2"


async def test_a_dead_letter_holds_its_job(rig: Rig) -> None:
    (job,) = await rig.submit()
    replica = rig.replica("a")
    (lease,) = await replica.claim(1, BLOCK_MS)
    assert await replica.fail(lease, "token id 9 is outside the vocabulary", fatal=True)
    ((_, fields),) = await rig.broker.redis.xrange(rig.broker.keys.dead)
    assert type(job).from_bytes(fields[b"job"]) == job
    assert DeadLetter.from_bytes(fields[b"data"]).error == "token id 9 is outside the vocabulary"
    assert await rig.length(rig.broker.keys.jobs) == 0


async def test_a_job_that_kills_its_replicas_is_given_up(rig: Rig) -> None:
    (job,) = await rig.submit()
    killed = [rig.replica(f"victim-{i}", lease_ms=SHORT_LEASE_MS, max_deliveries=2) for i in range(2)]
    await killed[0].claim(1, BLOCK_MS)
    await rig.expired(killed[1])
    survivor = rig.replica("survivor", lease_ms=SHORT_LEASE_MS, max_deliveries=2)

    async def given_up() -> bool:
        assert await survivor.claim_expired(1) == []
        return await rig.length(rig.broker.keys.dead) == 1

    await until_async(given_up)
    (delivery,) = await rig.groups.read(9, BLOCK_MS)
    assert isinstance(delivery.item, DeadLetter)
    assert "died or hung 2 times" in delivery.item.error
    assert delivery.item.replica_id == killed[1].consumer
    assert await rig.submission.submit([job], fence=rig.fence, limit=NO_LIMIT) == [Submitted.DEAD]


async def test_a_dead_letter_for_a_client_has_no_tombstone(rig: Rig) -> None:
    job = make_job(rig.run_id, sink=Sink.CLIENT)
    await rig.submission.submit_client(job, limit=10)
    replica = rig.replica("a", clients=True)
    (lease,) = await replica.claim(1, BLOCK_MS)
    await replica.fail(lease, "boom", fatal=True)
    assert await rig.length(rig.broker.keys.groups) == await rig.length(rig.broker.keys.evals) == 0
    assert (await rig.submission.status(job.job_id)).state is JobState.DEAD
    assert 0 < await rig.broker.redis.ttl(rig.broker.keys.job(job.job_id)) <= 3600


async def test_a_job_past_its_deadline_is_not_run(rig: Rig) -> None:
    late = make_job(rig.run_id, 0, deadline=time.time() - 60)
    early = make_job(rig.run_id, 1, deadline=time.time() + 600)
    await rig.submission.submit([late, early], fence=rig.fence, limit=NO_LIMIT)
    leases = await rig.replica("a").claim(8, BLOCK_MS)
    assert [lease.job.job_id for lease in leases] == [early.job_id]
    (delivery,) = await rig.groups.read(9, BLOCK_MS)
    assert isinstance(delivery.item, DeadLetter)
    assert (delivery.job_id, delivery.item.error) == (late.job_id, "deadline passed")


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "job", "id": "x", "sink": "train", "data": b"\x93junk", "at": 1},
        {"kind": "job", "id": "x", "sink": "train", "at": 1},
        {"kind": "job", "data": b"\xff"},
        {"unknown": "entry"},
        {"kind": "job", "id": "x", "sink": "train", "data": make_job("another-run").to_bytes(), "at": 1},
    ],
    ids=["junk", "no-data", "no-id", "no-fields", "another-run"],
)
async def test_a_damaged_entry_is_dead_lettered_once(rig: Rig, fields: dict[str, str | bytes | int]) -> None:
    await rig.broker.redis.xadd(rig.broker.keys.jobs, fields)
    replica = rig.replica("a")
    assert await replica.claim(4, BLOCK_MS) == []
    assert await rig.length(rig.broker.keys.dead) == 1
    assert await rig.length(rig.broker.keys.jobs) == 0
    (delivery,) = await rig.groups.read(4, BLOCK_MS) if "id" in fields else (None,)
    assert delivery is None or isinstance(delivery.item, DeadLetter)


async def test_a_damaged_entry_of_a_dead_replica_is_dead_lettered(rig: Rig) -> None:
    await rig.broker.redis.xadd(rig.broker.keys.jobs, {"unknown": "entry"})
    await rig.broker.read_group(rig.broker.keys.jobs, REPLICAS, "dead", 1, BLOCK_MS)
    replica = rig.replica("a", lease_ms=SHORT_LEASE_MS)

    async def gone() -> bool:
        assert await replica.claim_expired(4) == []
        return await rig.length(rig.broker.keys.jobs) == 0

    await until_async(gone)


async def test_a_second_entry_of_an_ended_job_is_dropped_and_counted(rig: Rig) -> None:
    (job,) = await rig.submit()
    ((_, fields),) = await rig.broker.redis.xrange(rig.broker.keys.jobs)
    a, b = rig.replica("a"), rig.replica("b")
    (first,) = await a.claim(1, BLOCK_MS)
    await rig.broker.redis.xadd(rig.broker.keys.jobs, fields)
    (second,) = await b.claim(1, BLOCK_MS)
    await rig.broker.redis.xadd(rig.broker.keys.jobs, fields)
    assert await a.commit(first, make_group(job)) is Committed.COMMITTED
    assert await b.commit(second, make_group(job)) is Committed.DUPLICATE
    assert await b.claim(1, BLOCK_MS) == []
    assert await rig.length(rig.broker.keys.groups) == 1
    assert await rig.length(rig.broker.keys.jobs) == 0
    assert await rig.counter("duplicates") == 2


async def test_a_group_that_does_not_answer_the_job_is_refused(rig: Rig) -> None:
    (job,) = await rig.submit()
    replica = rig.replica("a")
    (lease,) = await replica.claim(1, BLOCK_MS)
    group = make_group(job)
    with pytest.raises(RequestError, match="with n = 1 does not answer"):
        await replica.commit(lease, group.model_copy(update={"samples": group.samples[:1]}))
    forked = group.model_copy(update={"samples": group.samples * 2, "episode_sizes": (3, 1)})
    with pytest.raises(RequestError, match="with n = 1 does not answer"):
        await replica.commit(lease, forked.model_copy(update={"episode_sizes": (4,)}))
    assert await replica.commit(lease, forked) is Committed.COMMITTED


async def test_closing_gives_everything_back_at_once(rig: Rig) -> None:
    jobs = await rig.submit(3)
    leaving, staying = rig.replica("leaving"), rig.replica("staying", max_deliveries=1)
    await leaving.claim(3, BLOCK_MS)
    await leaving.close()
    leases = await staying.claim(9, BLOCK_MS)
    assert {lease.job.job_id for lease in leases} == {job.job_id for job in jobs}
    consumers = await rig.broker.redis.xinfo_consumers(rig.broker.keys.jobs, REPLICAS)
    assert [consumer["name"].decode() for consumer in consumers] == [staying.consumer]


async def test_closing_buries_a_damaged_entry(rig: Rig) -> None:
    replica = rig.replica("a")
    await rig.broker.redis.xadd(rig.broker.keys.jobs, {"unknown": "entry"})
    await rig.broker.read_group(rig.broker.keys.jobs, REPLICAS, replica.consumer, 1, BLOCK_MS)
    await replica.close()
    assert await rig.length(rig.broker.keys.jobs) == 0
    assert await rig.length(rig.broker.keys.dead) == 1
