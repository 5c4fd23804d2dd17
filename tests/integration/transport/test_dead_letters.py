"""Replay and drop: a job comes back exactly once or stays dead, even with concurrent operators."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from dvp_rl.contract.errors import LeaseLostError, NotFoundError, OverloadedError, RequestError
from dvp_rl.contract.group import DeadLetter, Group
from dvp_rl.contract.http import ReplicaState
from dvp_rl.contract.job import Job, JobState, Sink
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.dead_letters import DeadLetters, Letter, Outcome, Prospect
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.groups import GroupQueue
from dvp_rl.transport.health import queue_health
from dvp_rl.transport.lease import TrainerLease
from dvp_rl.transport.pending import Stream, pending
from dvp_rl.transport.replicas import ReplicaBeat, ReplicaRegistry
from dvp_rl.transport.runs import check_run, close_queue, open_queue, purge_run
from dvp_rl.transport.submission import Submission, Submitted
from tests.integration.transport.rig import BLOCK_MS, NO_LIMIT, Rig
from tests.kit.records import make_group, make_job
from tests.kit.wait import until_async


async def _kill(rig: Rig, count: int = 1, *, sink: Sink = Sink.TRAIN) -> list[Letter]:
    """Letters of `count` jobs that died, oldest first."""
    if sink is Sink.CLIENT:
        for position in range(count):
            await rig.submission.submit_client(make_job(rig.run_id, position, sink=sink), limit=NO_LIMIT)
    else:
        await rig.submit(count, sink=sink)
    replica = rig.replica("a", clients=sink is Sink.CLIENT)
    for lease in await replica.claim(count, BLOCK_MS):
        await replica.fail(lease, "boom", fatal=True)
    return (await DeadLetters(rig.broker).page())[::-1]


async def test_letters_are_listed_newest_first_in_pages(rig: Rig) -> None:
    letters = await _kill(rig, 5)
    dead = DeadLetters(rig.broker)
    first = await dead.page(2)
    second = await dead.page(2, before=first[-1].entry_id)
    assert [letter.entry_id for letter in first + second] == [letter.entry_id for letter in letters[:0:-1]]
    assert [letter async for page in dead.pages() for letter in page] == letters
    shown = await dead.get(letters[0].entry_id)
    assert shown == letters[0]
    assert shown.job == make_job(rig.run_id)
    assert (shown.letter.error, shown.letter.replica_id, shown.letter.deliveries) == ("boom", "a", 1)


@pytest.mark.parametrize("entry_id", ["1-1", "999999999999999-0"])
async def test_a_letter_that_is_not_there(rig: Rig, entry_id: str) -> None:
    await _kill(rig)
    with pytest.raises(NotFoundError, match=entry_id):
        await DeadLetters(rig.broker).get(entry_id)


@pytest.mark.parametrize("entry_id", ["", "+", "x-0", "1", "1-1-1", "١-١", "0-0", f"{2**64}-0"])
async def test_an_entry_id_that_is_none(rig: Rig, entry_id: str) -> None:
    dead = DeadLetters(rig.broker)
    for call in (dead.get(entry_id), dead.drop([entry_id]), dead.page(before=entry_id)):
        with pytest.raises(RequestError, match="expected one like"):
            await call


@pytest.mark.parametrize("sink", list(Sink))
async def test_a_replayed_job_is_as_if_it_had_never_died(rig: Rig, sink: Sink) -> None:
    (letter,) = await _kill(rig, sink=sink)
    assert letter.prospect is Prospect.OPEN
    dead = DeadLetters(rig.broker)
    assert await dead.replay([letter]) == [Outcome.REPLAYED]
    assert await dead.page() == []
    assert await rig.length(rig.broker.keys.groups) == await rig.length(rig.broker.keys.evals) == 0
    assert (await rig.in_flight() != set()) is (sink is Sink.TRAIN)
    assert await rig.submission.status(letter.letter.job_id) == (JobState.QUEUED, None, None)
    assert await rig.broker.redis.ttl(rig.broker.keys.job(letter.letter.job_id)) == -1
    (lease,) = await rig.finish(rig.replica("b", clients=sink is Sink.CLIENT), 4)
    assert (lease.job, lease.deliveries) == (letter.job, 0)
    if sink is Sink.CLIENT:
        assert await rig.submission.result(lease.job.job_id) == make_group(lease.job, "b")
    else:
        (delivery,) = await rig.groups.read(4, BLOCK_MS, sink)
        assert isinstance(delivery.item, Group)


async def test_a_replay_whose_reply_was_lost_is_told_the_same(rig: Rig) -> None:
    (letter,) = await _kill(rig)
    dead = DeadLetters(rig.broker)
    assert [await dead.replay([letter]) for _ in range(3)] == [[Outcome.REPLAYED]] * 3
    assert await rig.length(rig.broker.keys.jobs) == 1
    assert await rig.counter("replayed") == 1


async def test_a_job_that_dies_again_is_a_new_letter(rig: Rig) -> None:
    (letter,) = await _kill(rig)
    dead = DeadLetters(rig.broker)
    await dead.replay([letter])
    replica = rig.replica("b")
    (lease,) = await replica.claim(1, BLOCK_MS)
    await replica.fail(lease, "boom again", fatal=True)
    (again,) = await dead.page()
    assert (again.entry_id != letter.entry_id, again.letter.error) == (True, "boom again")
    assert await dead.replay([letter]) == [Outcome.REPLAYED]
    assert await rig.length(rig.broker.keys.jobs) == 0
    assert await dead.replay([again]) == [Outcome.REPLAYED]
    assert await rig.length(rig.broker.keys.jobs) == 1


async def test_a_death_that_the_trainer_has_counted_stays(rig: Rig) -> None:
    await _kill(rig)
    (delivery,) = await rig.groups.read(4, BLOCK_MS)
    dead = DeadLetters(rig.broker)
    for acknowledge in (False, True):
        if acknowledge:
            await rig.groups.acknowledge([delivery])
        (letter,) = await dead.page()
        assert letter.prospect is Prospect.CLOSED
        assert await dead.replay([letter]) == [Outcome.CLOSED]
        assert await rig.length(rig.broker.keys.jobs) == 0
    assert await dead.drop([letter.entry_id]) == [Outcome.DROPPED]


async def test_what_a_stalled_trainer_has_counted_stays(rig: Rig) -> None:
    """The trainer may only hang and continue later: a group that it no longer waits for would never be trained on."""
    await _kill(rig)
    await rig.groups.read(4, BLOCK_MS)
    await rig.broker.redis.delete(rig.broker.keys.lease)  # expires
    dead = DeadLetters(rig.broker)
    (letter,) = await dead.page()
    assert letter.prospect is Prospect.CLOSED
    assert await dead.replay([letter]) == [Outcome.CLOSED]
    assert await rig.length(rig.broker.keys.jobs) == 0


async def test_what_a_trainer_that_ended_had_counted_can_be_replayed(rig: Rig) -> None:
    await rig.broker.redis.delete(rig.broker.keys.lease)
    lease = TrainerLease(rig.broker, "ended")
    groups = GroupQueue(rig.broker, fence=await lease.acquire())
    await rig.submission.submit([make_job(rig.run_id)], fence=lease.token, limit=1)
    replica = rig.replica("a")
    (job,) = await replica.claim(1, BLOCK_MS)
    await replica.fail(job, "boom", fatal=True)
    assert isinstance((await groups.read(4, BLOCK_MS))[0].item, DeadLetter)
    await lease.release()
    with pytest.raises(LeaseLostError):
        await groups.read(4, BLOCK_MS)
    (letter,) = await DeadLetters(rig.broker).page()
    assert await DeadLetters(rig.broker).replay([letter]) == [Outcome.REPLAYED]
    successor = GroupQueue(rig.broker, fence=await TrainerLease(rig.broker, "successor").acquire())
    await successor.restore([job.job.job_id])
    await rig.finish(rig.replica("b"), 1)
    (delivery,) = await successor.read(4, BLOCK_MS)
    assert isinstance(delivery.item, Group)
    assert await rig.in_flight() == {job.job.job_id}


async def test_an_id_that_was_submitted_again_is_not_doubled(rig: Rig) -> None:
    (letter,) = await _kill(rig, sink=Sink.CLIENT)
    await rig.broker.redis.delete(rig.broker.keys.job(letter.letter.job_id))  # its TTL ends
    await rig.submission.submit_client(make_job(rig.run_id, sink=Sink.CLIENT), limit=1)
    dead = DeadLetters(rig.broker)
    assert (await dead.page())[0].prospect is Prospect.AGAIN
    assert await dead.replay([letter]) == [Outcome.AGAIN]
    assert await rig.length(rig.broker.keys.client_jobs) == 1


async def test_what_is_no_job_can_only_be_dropped(rig: Rig) -> None:
    await rig.broker.redis.xadd(rig.broker.keys.jobs, {"kind": "job", "id": "x", "sink": "client", "data": b"\xc1"})
    assert await rig.replica("a").claim(1, BLOCK_MS) == []
    dead = DeadLetters(rig.broker)
    (letter,) = await dead.page()
    assert (letter.job, letter.prospect) == (None, Prospect.NO_JOB)
    assert await dead.replay([letter]) == [Outcome.NO_JOB]
    assert await dead.drop([letter.entry_id] * 2) == [Outcome.DROPPED, Outcome.GONE]


async def test_a_crowd_replays_and_drops_without_losing_or_doubling(rig: Rig, broker_url: str) -> None:
    count = 40
    await _kill(rig, count)
    letters = await DeadLetters(rig.broker).page()

    async def replays() -> list[Outcome]:
        async with await Broker.connect(broker_url, rig.run_id) as own:
            return [(await DeadLetters(own).replay([letter]))[0] for letter in letters]

    async def drops() -> list[Outcome]:
        async with await Broker.connect(broker_url, rig.run_id) as own:
            return [(await DeadLetters(own).drop([letter.entry_id]))[0] for letter in reversed(letters)]

    first, second, dropped = await asyncio.gather(replays(), replays(), drops())
    fates = Counter(zip(first, second, reversed(dropped), strict=True))
    replayed, gone, drop = Outcome.REPLAYED, Outcome.GONE, Outcome.DROPPED
    back = sum(number for fate, number in fates.items() if fate[2] is gone)
    assert set(fates) <= {(replayed, replayed, gone), (gone, gone, drop)}
    assert await rig.length(rig.broker.keys.jobs) == await rig.counter("replayed") == back
    ids = [fields[b"id"] for _, fields in await rig.broker.redis.xrange(rig.broker.keys.jobs)]
    assert len(set(ids)) == back


async def test_a_full_broker_admits_no_replays(own_broker: EmbeddedBroker, run_id: str) -> None:
    async with await Broker.connect(own_broker.url, run_id) as broker:
        fence = await TrainerLease(broker, "test").acquire()
        rig = Rig(broker, fence, Submission(broker), GroupQueue(broker, fence=fence))
        (letter,) = await _kill(rig)
        used = (await broker.redis.info("memory"))["used_memory"]
        await broker.redis.config_set("maxmemory", int(used / 0.8))
        assert await DeadLetters(broker).replay([letter]) == [Outcome.MEMORY]
        assert len(await DeadLetters(broker).page()) == 1


async def test_a_closed_queue_runs_empty_and_opens_again(rig: Rig) -> None:
    await rig.submit(2)
    await close_queue(rig.broker, "maintenance", by="test")
    late: list[Job] = [make_job(rig.run_id, 2)]
    assert await rig.submission.submit(late, fence=rig.fence, limit=NO_LIMIT) == [Submitted.REFUSED]
    with pytest.raises(OverloadedError, match="being drained"):
        await rig.submission.submit_client(make_job(rig.run_id, sink=Sink.CLIENT), limit=NO_LIMIT)
    closed = [reason for reason in (await queue_health(rig.broker)).reasons if reason.verdict == "closed"]
    assert "maintenance" in closed[0].detail
    assert len(await rig.finish(rig.replica("a"), 4)) == 2
    assert [await open_queue(rig.broker, by="test"), await open_queue(rig.broker, by="test")] == [True, False]
    assert await rig.submission.submit(late, fence=rig.fence, limit=NO_LIMIT) == [Submitted.NEW]


async def test_pending_names_who_holds_what(rig: Rig) -> None:
    jobs = await rig.submit(3)
    replica = rig.replica("a")
    (done, *held) = await replica.claim(3, BLOCK_MS)
    await replica.commit(done, make_group(done.job))
    rows = await pending(rig.broker, Stream.JOBS, 10)
    assert [(row.entry_id, row.job_id, row.holder) for row in rows] == [
        (lease.entry_id, job.job_id, replica.consumer) for lease, job in zip(held, jobs[1:], strict=True)
    ]
    assert await pending(rig.broker, Stream.JOBS, 10, after=rows[0].entry_id) == rows[1:] or len(rows) == 2
    await rig.groups.read(1, BLOCK_MS)
    (group,) = await pending(rig.broker, Stream.GROUPS, 10)
    assert (group.job_id, group.sink, group.holder) == (jobs[0].job_id, "train", f"trainer/{rig.fence}")
    assert 0 <= group.silent_s <= group.age_s < 60


async def test_a_purge_removes_the_run_and_nothing_else(rig: Rig, broker_url: str) -> None:
    await _kill(rig, 2)
    async with await Broker.connect(broker_url, f"{rig.run_id}-2") as neighbour:
        with pytest.raises(RequestError, match="is being trained by test"):
            await purge_run(rig.broker, by="test")
        await rig.broker.redis.delete(rig.broker.keys.lease)
        await ReplicaRegistry(rig.broker).beat(ReplicaBeat("a", ReplicaState.SERVING, "run:0:ab", in_flight=0))
        with pytest.raises(RequestError, match="replica a is serving"):
            await purge_run(rig.broker, by="test")
        await ReplicaRegistry(rig.broker).leave("a")
        assert await purge_run(rig.broker, by="test") == 2
        left = [key async for key in rig.broker.redis.scan_iter(rig.broker.keys.everything)]
        assert left == [rig.broker.keys.audit.encode()]
        await check_run(neighbour)
        with pytest.raises(NotFoundError, match=f"runs there: {neighbour.run_id}"):
            await check_run(rig.broker)


async def test_a_forced_purge_costs_time_only(rig: Rig) -> None:
    jobs = await rig.submit(2)
    await purge_run(rig.broker, by="test", force=True)
    assert await rig.submission.submit(jobs, fence=rig.fence, limit=2) == [Submitted.NEW] * 2
    assert len(await until_async(lambda: rig.finish(rig.replica("a"), 4))) == 2


async def test_watching_creates_nothing(broker_url: str, run_id: str) -> None:
    async with await Broker.connect(broker_url, run_id, create=False) as broker:
        assert (await queue_health(broker)).verdict == "idle"
        assert await DeadLetters(broker).page() == await pending(broker, Stream.JOBS, 5) == []
        with pytest.raises(NotFoundError, match="no such run"):
            await check_run(broker)
