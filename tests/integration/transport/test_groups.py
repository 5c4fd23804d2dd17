"""The trainer's side: every group arrives once per trainer, and none is deleted before its checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from dvp_rl.contract.errors import LeaseLostError
from dvp_rl.contract.group import DeadLetter
from dvp_rl.contract.job import JobState, Sink
from dvp_rl.contract.keys import TRAINER
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.groups import Delivery, GroupQueue
from dvp_rl.transport.health import take_snapshot
from dvp_rl.transport.lease import TrainerLease
from dvp_rl.transport.pending import Stream, pending
from dvp_rl.transport.submission import Submission, Submitted
from tests.integration.transport.rig import BLOCK_MS, NO_LIMIT, Rig
from tests.kit.records import make_group, make_job, make_sample
from tests.kit.wait import until_async


async def _next_trainer(rig: Rig) -> Rig:
    """A new trainer, after the previous one died and its lease expired."""
    await rig.broker.redis.delete(rig.broker.keys.lease)
    fence = await TrainerLease(rig.broker, "next").acquire()
    return Rig(rig.broker, fence, rig.submission, GroupQueue(rig.broker, fence=fence))


def _ids(deliveries: list[Delivery]) -> list[str]:
    return [delivery.job_id for delivery in deliveries]


async def test_groups_come_once_and_in_order(rig: Rig) -> None:
    jobs = await rig.submit(5)
    await rig.finish(rig.replica("a"), 5)
    parts = [await rig.groups.read(2, BLOCK_MS) for _ in range(4)]
    assert [_ids(part) for part in parts] == [[job.job_id for job in jobs[at : at + 2]] for at in (0, 2, 4)] + [[]]
    assert await rig.groups.read(2, 1) == []


async def test_sinks_do_not_mix(rig: Rig) -> None:
    await rig.submit(1)
    await rig.submit(1, sink=Sink.EVAL)
    await rig.finish(rig.replica("a"), 2)
    (train,) = await rig.groups.read(9, BLOCK_MS)
    (held_out,) = await rig.groups.read(9, BLOCK_MS, Sink.EVAL)
    assert (train.sink, held_out.sink, held_out.job_id) == (Sink.TRAIN, Sink.EVAL, "eval-0")
    await rig.groups.acknowledge([train, held_out])
    assert await rig.length(rig.broker.keys.groups) == await rig.length(rig.broker.keys.evals) == 0


async def test_settled_groups_are_kept_until_acknowledged(rig: Rig) -> None:
    jobs = await rig.submit(3)
    await rig.finish(rig.replica("a"), 3)
    deliveries = await rig.groups.read(9, BLOCK_MS)
    for _ in range(2):
        await rig.groups.settle(trained=[jobs[0].job_id, jobs[1].job_id], dropped=[jobs[2].job_id])
        assert await rig.in_flight() == set()
        assert await rig.uncheckpointed() == {job.job_id for job in jobs}
    assert (await rig.counter("trained"), await rig.counter("dropped")) == (2, 1)
    assert await rig.length(rig.broker.keys.groups) == 3
    for _ in range(2):
        await rig.groups.acknowledge(deliveries)
        assert await rig.uncheckpointed() == set()
        assert await rig.length(rig.broker.keys.groups) == 0
        assert await rig.counter("acked") == 3
    assert (await rig.submission.status(jobs[0].job_id)).state is JobState.DONE
    assert 0 < await rig.broker.redis.ttl(rig.broker.keys.job(jobs[0].job_id)) <= 3600


async def test_the_next_trainer_gets_what_was_not_acknowledged(rig: Rig) -> None:
    jobs = await rig.submit(6)
    replica = rig.replica("a")
    await rig.finish(replica, 4)
    first = await rig.groups.read(9, BLOCK_MS)
    await rig.groups.settle(trained=_ids(first))
    await rig.groups.acknowledge(first[:1])
    after = await _next_trainer(rig)
    await after.groups.restore([job.job_id for job in jobs[1:]])
    assert await after.uncheckpointed() == set()
    assert await after.in_flight() == {job.job_id for job in jobs[1:]}
    await rig.finish(replica, 2)
    seen = [job_id for _ in range(3) for job_id in _ids(await after.groups.read(2, BLOCK_MS))]
    assert seen == [job.job_id for job in jobs[1:]]
    assert await after.counter("redelivered_groups") == 3


async def test_large_groups_are_never_copied_all_at_once(own_broker: EmbeddedBroker, run_id: str) -> None:
    """This holds for reads, takeovers and observers: a broker with little memory besides its data would be killed, and
    again on every resume."""
    count, tokens = 24, 2**18
    async with await Broker.connect(own_broker.url, run_id) as broker:
        first = Rig(broker, 0, Submission(broker), GroupQueue(broker, fence=0))
        replica, jobs = first.replica("a"), [make_job(run_id, position, n=1) for position in range(count)]
        sample = make_sample([5] * tokens, [-0.5] * tokens, run_id=run_id)
        size = len(make_group(jobs[0], samples=[sample]).to_bytes())
        await first.submission.submit(jobs, fence=0, limit=NO_LIMIT)
        for lease in await replica.claim(count, BLOCK_MS):
            await replica.commit(lease, make_group(lease.job, samples=[sample]))
        before = await broker.redis.info("memory")
        assert before["used_memory"] > len(jobs) * size
        delivered = await first.groups.read(99, BLOCK_MS)
        after = await _next_trainer(first)
        recovered = await after.groups.read(99, BLOCK_MS)
        assert _ids(delivered) == _ids(recovered) == [job.job_id for job in jobs]
        assert len(await pending(broker, Stream.GROUPS, 99)) == len(jobs)
        await take_snapshot(broker)
        await after.groups.acknowledge(recovered[:1])
        await after.submission.submit(jobs, fence=after.fence, limit=NO_LIMIT)
        peak = (await broker.redis.info("memory"))["used_memory_peak"]
        assert peak - before["used_memory"] < 5 * size


async def test_groups_that_a_stopped_trainer_reads_late_are_not_lost(rig: Rig) -> None:
    after = await _next_trainer(rig)
    assert await after.groups.read(9, 1) == []
    (job,) = await after.submit()
    await after.finish(after.replica("a"), 1)
    # The old trainer was stopped between its fence check and its read, and reads late.
    await rig.broker.read_group(rig.broker.keys.groups, TRAINER, f"trainer/{rig.fence}", 9, BLOCK_MS)
    assert _ids(await until_async(lambda: after.groups.read(9, 1))) == [job.job_id]


async def test_a_reply_lost_on_the_network_is_read_again(rig: Rig) -> None:
    jobs = await rig.submit(2)
    replica = rig.replica("a")
    await rig.finish(replica, 1)
    assert len(await rig.groups.read(9, BLOCK_MS)) == 1
    await rig.finish(replica, 1)
    await rig.broker.read_group(rig.broker.keys.groups, TRAINER, f"trainer/{rig.fence}", 9, BLOCK_MS)
    assert _ids(await until_async(lambda: rig.groups.read(9, 1))) == [jobs[1].job_id]
    assert await rig.groups.read(9, 1) == []


async def test_a_fenced_trainer_changes_nothing(rig: Rig) -> None:
    jobs = await rig.submit(2)
    await rig.finish(rig.replica("a"), 1)
    (delivery,) = await rig.groups.read(9, BLOCK_MS)
    after = await _next_trainer(rig)
    ids = [job.job_id for job in jobs]
    for attempt in (
        lambda: rig.groups.read(9, 1),
        lambda: rig.groups.settle(trained=ids),
        lambda: rig.groups.settle(dropped=ids),
        lambda: rig.groups.acknowledge([delivery]),
        lambda: rig.groups.restore([]),
    ):
        with pytest.raises(LeaseLostError, match="another trainer took over"):
            await attempt()
    assert await after.in_flight() == set(ids)
    assert await after.uncheckpointed() == set()
    assert _ids(await after.groups.read(9, BLOCK_MS)) == [ids[0]]


async def test_restore_leaves_the_dead_out(rig: Rig) -> None:
    jobs = await rig.submit(3)
    replica = rig.replica("a")
    (lease,) = await replica.claim(1, BLOCK_MS)
    await replica.fail(lease, "boom", fatal=True)
    await rig.groups.restore([job.job_id for job in jobs])
    assert await rig.in_flight() == {job.job_id for job in jobs[1:]}


async def test_an_undecodable_group_is_a_dead_letter(rig: Rig) -> None:
    (job,) = await rig.submit()
    entry = {"kind": "group", "id": job.job_id, "sink": "train", "data": b"\x00junk", "at": 1}
    await rig.broker.redis.xadd(rig.broker.keys.groups, entry)
    (delivery,) = await until_async(lambda: rig.groups.read(9, 1))
    assert isinstance(delivery.item, DeadLetter)
    assert "not a group" in delivery.item.error
    assert await rig.submission.submit([job], fence=rig.fence, limit=NO_LIMIT) == [Submitted.DEAD]
    await rig.groups.acknowledge([delivery])
    assert await rig.length(rig.broker.keys.groups) == 0
    assert await rig.in_flight() == set()


@pytest.mark.parametrize("dies", [False, True])
async def test_a_trainer_that_lost_its_checkpoint_gets_its_jobs_again(rig: Rig, dies: bool) -> None:
    (job,) = await rig.submit()
    replica = rig.replica("a")
    for round in (1, 2):
        (lease,) = await replica.claim(1, BLOCK_MS)
        await (replica.fail(lease, "boom", fatal=True) if dies else replica.commit(lease, make_group(job)))
        (delivery,) = await rig.groups.read(9, BLOCK_MS)
        ended = [Submitted.DEAD if dies else Submitted.DONE]
        assert await rig.submission.submit([job], fence=rig.fence, limit=NO_LIMIT) == ended
        await rig.groups.acknowledge([delivery])
        if round == 1:
            assert await rig.submission.submit([job], fence=rig.fence, limit=NO_LIMIT) == [Submitted.NEW]
            assert await rig.submission.submit([job], fence=rig.fence, limit=NO_LIMIT) == [Submitted.QUEUED]


async def test_an_entry_that_is_nothing_at_all_ends_in_the_dead_letters(rig: Rig) -> None:
    await rig.broker.redis.xadd(rig.broker.keys.evals, {"what": "ever"})
    assert await rig.groups.read(9, 1, Sink.EVAL) == []
    assert await rig.length(rig.broker.keys.evals) == 0
    assert await rig.length(rig.broker.keys.dead) == 1


async def test_tombstones_survive_until_acknowledged(rig: Rig) -> None:
    job = make_job(rig.run_id)
    await rig.submission.submit([job], fence=rig.fence, limit=1)
    replica = rig.replica("a")
    (lease,) = await replica.claim(1, BLOCK_MS)
    await replica.fail(lease, "boom", fatal=True)
    assert _ids(await rig.groups.read(9, BLOCK_MS)) == [job.job_id]
    after = await _next_trainer(rig)
    (again,) = await after.groups.read(9, BLOCK_MS)
    await after.groups.acknowledge([again])
    assert await (await _next_trainer(after)).groups.read(9, 1) == []


@pytest.mark.parametrize("during", ["read_group", "script"])
async def test_who_asks_to_look_again_during_a_read_is_heard(
    during: str, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker lost an entry that was delivered, and the reply with another entry was lost: the counts agree."""
    redis, key, groups = rig.broker.redis, rig.broker.keys.groups, rig.groups
    _, unheard = await rig.submit(2)
    await rig.finish(replica := rig.replica("a"), 1)
    (given,) = await groups.read(9, BLOCK_MS)
    await redis.xack(key, TRAINER, given.entry_id)
    await redis.xdel(key, given.entry_id)
    await rig.finish(replica, 1)
    await redis.xreadgroup(TRAINER, f"trainer/{rig.fence}", {key: ">"})
    call, calls = getattr(rig.broker, during), list[object]()

    async def asked(*args: Any) -> Any:
        reply = await call(*args)
        if args[0] in (key, "takeover"):
            calls.append(reply)
            if len(calls) == 1:
                groups.look_again()
        return reply

    monkeypatch.setattr(rig.broker, during, asked)
    if during == "script":
        groups.look_again()
        monkeypatch.setattr(groups._inboxes[Sink.TRAIN], "cursor", "9999999999999-0")
    heard = [delivery for _ in range(2) for delivery in await groups.read(9, BLOCK_MS)]
    assert _ids(heard) == [unheard.job_id]
    assert calls
