"""Admission is exact, and resubmitting is always safe."""

from __future__ import annotations

import asyncio
import math
from collections import Counter

import pytest

from dvp_rl.contract.errors import LeaseLostError, NotFoundError, OverloadedError, RequestError, UnavailableError
from dvp_rl.contract.http import ReplicaState
from dvp_rl.contract.job import Job, JobState, Sink
from dvp_rl.contract.keys import REPLICAS
from dvp_rl.transport.broker import CLIENT_MEMORY_SHARE, CLIENT_SHARE, Broker
from dvp_rl.transport.dead_letters import DeadLetters, Outcome
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.groups import GroupQueue
from dvp_rl.transport.jobs import Lease
from dvp_rl.transport.lease import TrainerLease
from dvp_rl.transport.replicas import ReplicaBeat, ReplicaRegistry
from dvp_rl.transport.results import client_jobs
from dvp_rl.transport.submission import Submission, Submitted
from tests.integration.transport.rig import BLOCK_MS, NO_LIMIT, Rig
from tests.kit.records import make_group, make_job
from tests.kit.wait import until_async


async def test_resubmitting_answers_the_state(rig: Rig) -> None:
    jobs = await rig.submit(4)
    replica = rig.replica("a")
    for fate in ("done", "dead", "running"):
        (lease,) = await replica.claim(1, BLOCK_MS)
        if fate == "done":
            await replica.commit(lease, make_group(lease.job))
        elif fate == "dead":
            await replica.fail(lease, "boom", fatal=True)
    again = await rig.submission.submit(jobs, fence=rig.fence, limit=0)
    assert again == [Submitted.DONE, Submitted.DEAD, Submitted.RUNNING, Submitted.QUEUED]
    assert await rig.counter("submitted") == 4


async def test_admission_is_exact_under_concurrency(rig: Rig) -> None:
    jobs = [make_job(rig.run_id, position) for position in range(60)]
    chunks = [jobs[start : start + 7] for start in range(0, 60, 5)]
    outcomes = await asyncio.gather(
        *(rig.submission.submit(chunk, fence=rig.fence, limit=23) for chunk in chunks),
    )
    admitted = [outcome for part in outcomes for outcome in part if outcome is Submitted.NEW]
    assert len(admitted) == len(await rig.in_flight()) == await rig.length(rig.broker.keys.jobs) == 23


async def test_settled_groups_make_room_before_they_are_acknowledged(rig: Rig) -> None:
    jobs = [make_job(rig.run_id, position) for position in range(4)]
    assert await rig.submission.submit(jobs, fence=rig.fence, limit=2) == [
        *[Submitted.NEW] * 2,
        *[Submitted.REFUSED] * 2,
    ]
    replica = rig.replica("a")
    await rig.finish(replica, 2)
    deliveries = await rig.groups.read(2, BLOCK_MS)
    assert await rig.submission.submit(jobs[2:], fence=rig.fence, limit=2) == [Submitted.REFUSED] * 2
    await rig.groups.settle(trained=[deliveries[0].job_id])
    assert await rig.submission.submit(jobs[2:], fence=rig.fence, limit=2) == [Submitted.NEW, Submitted.REFUSED]
    assert await rig.uncheckpointed() == {deliveries[0].job_id}


async def test_a_dead_job_makes_room(rig: Rig) -> None:
    jobs = [make_job(rig.run_id, position) for position in range(2)]
    await rig.submission.submit(jobs[:1], fence=rig.fence, limit=1)
    replica = rig.replica("a")
    (lease,) = await replica.claim(1, BLOCK_MS)
    await replica.fail(lease, "boom", fatal=True)
    assert await rig.submission.submit(jobs[1:], fence=rig.fence, limit=1) == [Submitted.NEW]


async def test_evaluation_is_not_counted(rig: Rig) -> None:
    await rig.submit(3, limit=0, sink=Sink.EVAL)
    assert await rig.in_flight() == set()


async def test_a_long_list_goes_in_pieces(rig: Rig) -> None:
    jobs = [make_job(rig.run_id, position) for position in range(150)]
    outcomes = await rig.submission.submit(jobs, fence=rig.fence, limit=130)
    assert outcomes == [Submitted.NEW] * 130 + [Submitted.REFUSED] * 20


async def test_an_old_fence_submits_nothing(rig: Rig) -> None:
    with pytest.raises(LeaseLostError, match=f"another trainer took over run {rig.run_id}"):
        await rig.submission.submit([make_job(rig.run_id)], fence=rig.fence - 1, limit=9)
    assert await rig.length(rig.broker.keys.jobs) == 0


@pytest.mark.parametrize("rest", ["000000100:0", "eval:3:1:7", "", "mine"])
async def test_a_client_cannot_take_an_id_of_the_trainer(rig: Rig, rest: str) -> None:
    client = make_job(rig.run_id, sink=Sink.CLIENT)
    own = f"{rig.run_id}:{rest}"
    with pytest.raises(RequestError, match=f"job_id: got {own}, allowed: any that does not begin with"):
        await rig.submission.submit_client(client.model_copy(update={"job_id": own}), limit=9)
    assert await rig.length(rig.broker.keys.jobs) == 0
    for beside in (rig.run_id, f"{rig.run_id}-b:000000100:0"):
        await rig.submission.submit_client(client.model_copy(update={"job_id": beside}), limit=9)
    squatted = make_job(rig.run_id, 100)
    assert await rig.submission.submit([squatted], fence=rig.fence, limit=9) == [Submitted.NEW]


async def test_foreign_jobs_are_refused(rig: Rig) -> None:
    with pytest.raises(RequestError, match="run_id: 'other'"):
        await rig.submission.submit([make_job("other")], fence=rig.fence, limit=9)
    with pytest.raises(RequestError, match=r"sink: .*client.*, allowed here: train, eval"):
        await rig.submission.submit([make_job(rig.run_id, sink=Sink.CLIENT)], fence=rig.fence, limit=9)
    with pytest.raises(RequestError, match=r"sink: .*train.*, allowed here: client"):
        await rig.submission.submit_client(make_job(rig.run_id), limit=9)


async def test_a_client_gets_its_result(rig: Rig) -> None:
    job = make_job(rig.run_id, sink=Sink.CLIENT)
    assert await rig.submission.submit_client(job, limit=1) is Submitted.NEW
    assert await rig.submission.submit_client(job, limit=1) is Submitted.QUEUED
    assert await rig.submission.status(job.job_id) == (JobState.QUEUED, None, None)
    await rig.finish(rig.replica("a", clients=True), 1)
    report = await rig.submission.status(job.job_id)
    result = make_group(job, "a")
    assert report == (JobState.DONE, None, len(result.to_bytes()))
    assert await rig.submission.result(job.job_id) == result
    for key in (rig.broker.keys.job(job.job_id), rig.broker.keys.result(job.job_id)):
        assert 0 < await rig.broker.redis.ttl(key) <= 3600
    assert await rig.length(rig.broker.keys.groups) == 0


async def test_an_unknown_job_is_not_found(rig: Rig) -> None:
    with pytest.raises(NotFoundError, match="'nobody'"):
        await rig.submission.status("nobody")
    with pytest.raises(NotFoundError, match="'nobody'"):
        await rig.submission.result("nobody")


async def test_a_full_backlog_refuses_clients_with_a_reason(rig: Rig) -> None:
    jobs = [make_job(rig.run_id, position, sink=Sink.CLIENT) for position in range(3)]
    for job in jobs[:2]:
        await rig.submission.submit_client(job, limit=2)
    with pytest.raises(OverloadedError, match="2 jobs already wait") as refusal:
        await rig.submission.submit_client(jobs[2], limit=2)
    assert refusal.value.retry_after_s > 0
    assert await rig.submission.submit_client(jobs[0], limit=2) is Submitted.QUEUED
    await rig.submit(2)
    # A job that a replica has read does not count as waiting, nor do the trainer's jobs.
    await rig.replica("a", clients=True).claim(1, BLOCK_MS)
    assert await rig.submission.submit_client(jobs[2], limit=2) is Submitted.NEW


async def test_a_deleted_job_is_forgotten_whatever_became_of_it(rig: Rig) -> None:
    """The job can be submitted again under the same id."""
    jobs = {name: client_job(rig, name) for name in ("done", "dead", "running", "read", "queued")}
    replica = rig.replica("a", clients=True)
    for name, job in jobs.items():
        await rig.submission.submit_client(job, limit=NO_LIMIT)
        if name == "read":
            await rig.broker.read_group(rig.broker.keys.client_jobs, REPLICAS, replica.consumer, 1, BLOCK_MS)
        elif name != "queued":
            (lease,) = await replica.claim(1, BLOCK_MS)
            if name == "done":
                await replica.commit(lease, make_group(job))
            elif name == "dead":
                await replica.fail(lease, "boom", fatal=True)
    states = {name: await rig.submission.delete(job.job_id) for name, job in jobs.items()}
    assert states == {name: "queued" if name == "read" else name for name in jobs}
    assert await taken(rig) == {}
    assert await rig.length(rig.broker.keys.dead) == 0
    assert await rig.length(rig.broker.keys.client_jobs) == 0
    assert await rig.counter("cancelled") == 3
    for job in jobs.values():
        with pytest.raises(NotFoundError, match=f"'{job.job_id}': never submitted, deleted, or ended"):
            await rig.submission.delete(job.job_id)
        assert await rig.submission.submit_client(job, limit=NO_LIMIT) is Submitted.NEW
    # The replica that ran it learns that its lease is lost, and cannot answer the new job.
    assert await replica.renew([lease]) == [lease]
    with pytest.raises(LeaseLostError):
        await replica.commit(lease, make_group(lease.job))
    assert len(await rig.finish(rig.replica("b", clients=True), 9)) == 5


async def test_a_job_that_is_not_done_in_time_is_dead_wherever_it_is(rig: Rig) -> None:
    names = ("done", "dead", "running", "back", "read", "queued", "later", "never")
    jobs = {name: client_job(rig, name) for name in names}
    replica, held = rig.replica("a", clients=True), dict[str, Lease]()
    for name, job in jobs.items():
        deadline_s = {"later": 3600.0, "never": None}.get(name, 60.0)
        assert await rig.submission.submit_client(job, limit=NO_LIMIT, deadline_s=deadline_s) is Submitted.NEW
        if name == "read":
            await rig.broker.read_group(rig.broker.keys.client_jobs, REPLICAS, replica.consumer, 1, BLOCK_MS)
        elif name in ("done", "dead", "running", "back"):
            (held[name],) = await replica.claim(1, BLOCK_MS)
    await replica.commit(held["done"], make_group(jobs["done"]))
    await rig.broker.redis.zadd(rig.broker.keys.client_deadlines, {"done": 1})  # as an older version left it
    await replica.fail(held["dead"], "boom", fatal=True)
    await replica.release(held["back"])
    before = {name: (await rig.submission.status(name)).state for name in jobs}
    assert list(before.values()) == ["done", "dead", "running", *["queued"] * 5]
    await pass_time(rig, 61)
    await ReplicaRegistry(rig.broker).beat(ReplicaBeat("a", ReplicaState.SERVING, f"{rig.run_id}:0:aa", 0))

    overdue = (JobState.DEAD, "its deadline passed before it was done", None)
    for name in ("running", "back", "read", "queued"):
        assert await rig.submission.status(name) == overdue
        assert 0 < await rig.broker.redis.ttl(rig.broker.keys.job(name)) <= 3600
    for name in ("done", "dead", "later", "never"):
        assert (await rig.submission.status(name)).state is before[name]
    assert (await rig.submission.status("dead")).error == "boom"
    # Only jobs that wait or ended otherwise take memory, and only waiting jobs keep a deadline.
    (letter,) = await (letters := DeadLetters(rig.broker)).page()
    assert (await taken(rig)).keys() == {"later", "never", "done", letter.entry_id}
    assert await rig.broker.redis.zrange(rig.broker.keys.client_deadlines, 0, -1) == [b"later"]
    assert await rig.counter("overdue") == 4
    assert await replica.renew([held["running"]]) == [held["running"]]
    # A replayed job has no deadline: the operator wants its result, however late.
    assert await letters.replay([letter]) == [Outcome.REPLAYED]
    leases = await rig.finish(rig.replica("b", clients=True), 9)
    assert [lease.job.job_id for lease in leases] == ["later", "never", "dead"]
    assert await rig.length(rig.broker.keys.client_jobs) == 0


async def test_no_replica_begins_a_job_that_is_late(rig: Rig) -> None:
    for name, deadline_s in (("late", 60.0), ("early", 3600.0)):
        await rig.submission.submit_client(client_job(rig, name), limit=NO_LIMIT, deadline_s=deadline_s)
    await pass_time(rig, 61)
    leases = await rig.replica("a", clients=True).claim(9, BLOCK_MS)
    assert [lease.job.job_id for lease in leases] == ["early"]
    assert (await rig.submission.status("late")).state is JobState.DEAD


async def test_a_deadline_ends_only_the_job_that_has_it(rig: Rig) -> None:
    """A deadline that an older version left behind must not end the next job with the same id."""
    await rig.submission.submit_client(client_job(rig, "dead"), limit=NO_LIMIT)
    (lease,) = await (replica := rig.replica("a", clients=True)).claim(1, BLOCK_MS)
    await replica.fail(lease, "boom", fatal=True)
    await rig.broker.redis.zadd(rig.broker.keys.client_deadlines, {"again": 9e15, "dead": 9e15})
    await rig.submission.submit_client(client_job(rig, "again"), limit=NO_LIMIT)
    letters = DeadLetters(rig.broker)
    assert await letters.replay(await letters.page()) == [Outcome.REPLAYED]
    assert await rig.broker.redis.exists(rig.broker.keys.client_deadlines) == 0


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, 1e300, math.inf, math.nan])
async def test_a_deadline_is_within_a_month(rig: Rig, deadline_s: float) -> None:
    with pytest.raises(RequestError, match=r"deadline_s: got .*, allowed: number in \(0, 2592000\]"):
        await rig.submission.submit_client(client_job(rig, "a"), limit=NO_LIMIT, deadline_s=deadline_s)


async def test_a_damaged_job_stops_no_heartbeat_for_long(rig: Rig) -> None:
    await rig.submission.submit_client(client_job(rig, "damaged"), limit=NO_LIMIT, deadline_s=60)
    await rig.broker.redis.hset(rig.broker.keys.job("damaged"), "client_entry", "no entry")
    await pass_time(rig, 61)
    registry, beat = ReplicaRegistry(rig.broker), ReplicaBeat("a", ReplicaState.SERVING, f"{rig.run_id}:0:aa", 0)
    with pytest.raises(UnavailableError, match="Invalid stream ID"):
        await registry.beat(beat)
    await registry.beat(beat)


async def test_overdue_jobs_make_room_for_the_next(rig: Rig) -> None:
    first, second = client_job(rig, "first"), client_job(rig, "second")
    await rig.submission.submit_client(first, limit=1, deadline_s=0.001)
    await until_async(lambda: admitted(rig, second))
    assert (await rig.submission.status("first")).state is JobState.DEAD
    # Its id is taken until the job is deleted.
    assert await rig.submission.submit_client(first, limit=9) is Submitted.DEAD
    assert await rig.submission.delete("first") is JobState.DEAD
    assert await rig.submission.submit_client(first, limit=9) is Submitted.NEW


async def admitted(rig: Rig, job: Job) -> bool:
    try:
        return await rig.submission.submit_client(job, limit=1) is Submitted.NEW
    except OverloadedError:
        return False


async def pass_time(rig: Rig, seconds: float) -> None:
    """Moves all deadlines `seconds` closer."""
    key = rig.broker.keys.client_deadlines
    for name in await rig.broker.redis.zrange(key, 0, -1):
        await rig.broker.redis.zincrby(key, -seconds * 1000, name)


async def queue_as_before(rig: Rig, name: str) -> None:
    """Queues a client's job in the trainer's queue, as an older version did. The entry of another job gets the same id,
    because ids are unique within one stream only."""
    redis, keys = rig.broker.redis, rig.broker.keys
    await rig.submission.submit_client(client_job(rig, name), limit=NO_LIMIT)
    ((entry, fields),) = await redis.xrange(keys.client_jobs)
    await redis.xdel(keys.client_jobs, entry)
    await redis.hdel(keys.job(name), "client_entry")
    moved = await redis.xadd(keys.jobs, fields)
    await redis.hset(keys.job(name), "entry", moved)
    await rig.submission.submit_client(client_job(rig, "other"), limit=NO_LIMIT)
    ((entry, fields),) = await redis.xrange(keys.client_jobs)
    await redis.delete(keys.client_jobs)
    await redis.xadd(keys.client_jobs, fields, id=moved)
    await redis.hset(keys.job("other"), "client_entry", moved)
    await rig.broker.ensure_groups()


async def test_a_job_that_an_older_version_queued_among_the_trainers_is_moved(rig: Rig) -> None:
    (train,) = await rig.submit(1)
    await queue_as_before(rig, "old")
    trainers, clients = rig.replica("a"), rig.replica("a", clients=True)
    assert [lease.job.job_id for lease in await trainers.claim(9, BLOCK_MS)] == [train.job_id]
    assert [lease.job.job_id for lease in await clients.claim(9, BLOCK_MS)] == ["other", "old"]
    assert await rig.length(rig.broker.keys.jobs) == 1
    assert [await rig.submission.delete(name) for name in ("old", "other")] == [JobState.RUNNING] * 2
    assert await rig.length(rig.broker.keys.client_jobs) == 0


@pytest.mark.parametrize("name", ["old", "other"])
async def test_a_deletion_finds_the_entry_of_its_own_job(rig: Rig, name: str) -> None:
    await rig.submit(1)
    await queue_as_before(rig, "old")
    assert await rig.submission.delete(name) is JobState.QUEUED
    left = [
        fields[b"id"].decode()
        for stream in (rig.broker.keys.jobs, rig.broker.keys.client_jobs)
        for _, fields in await rig.broker.redis.xrange(stream)
    ]
    assert sorted(left) == sorted({f"{rig.run_id}:000000000:0", "old", "other"} - {name})


async def test_an_older_versions_deletion_finds_no_client_entry_among_the_trainers(rig: Rig) -> None:
    """The older version would drop the entry of JOBS that the job's hash names as `entry`, even another job's."""
    await rig.submission.submit_client(client_job(rig, "new"), limit=NO_LIMIT)
    (lease,) = await (replica := rig.replica("a", clients=True)).claim(1, BLOCK_MS)
    await replica.release(lease)
    assert not await rig.broker.redis.hexists(rig.broker.keys.job("new"), "entry")


async def test_a_client_cannot_delete_what_is_the_trainers(rig: Rig) -> None:
    (job,) = await rig.submit(1)
    with pytest.raises(RequestError, match=f"job {job.job_id} is the trainer's"):
        await rig.submission.delete(job.job_id)
    assert (await rig.submission.status(job.job_id)).state is JobState.QUEUED


async def test_results_of_clients_have_their_share_of_the_memory(own_broker: EmbeddedBroker, run_id: str) -> None:
    async with await Broker.connect(own_broker.url, run_id) as broker:
        rig = Rig(broker, 0, Submission(broker), GroupQueue(broker, fence=0))
        jobs = [client_job(rig, str(i), tokens=100_000) for i in range(3)]
        size = jobs[0].max_bytes
        await broker.redis.config_set("maxmemory", int(2.5 * size / CLIENT_SHARE))
        for job in jobs[:2]:
            await rig.submission.submit_client(job, limit=NO_LIMIT)

        async def refused(job: Job) -> None:
            with pytest.raises(
                OverloadedError, match=r"clients' jobs and sessions use or have reserved .* of 3\.8 MiB \(25% of"
            ):
                await rig.submission.submit_client(job, limit=NO_LIMIT)

        await refused(jobs[2])
        assert await rig.submission.submit_client(jobs[0], limit=NO_LIMIT) is Submitted.QUEUED
        # A stored result counts with its actual size, not with its bound.
        replica = rig.replica("a", clients=True)
        (lease,) = await replica.claim(1, BLOCK_MS)
        await replica.commit(lease, make_group(jobs[0]))
        assert await rig.submission.submit_client(jobs[2], limit=NO_LIMIT) is Submitted.NEW
        more = client_job(rig, "more", tokens=100_000)
        await refused(more)
        # A death makes room; a replay takes it again.
        (lease,) = await replica.claim(1, BLOCK_MS)
        await replica.fail(lease, "boom", fatal=True)
        assert await rig.submission.submit_client(more, limit=NO_LIMIT) is Submitted.NEW
        letters = DeadLetters(broker)
        assert await letters.replay(await letters.page()) == [Outcome.MEMORY]
        await rig.submission.delete(more.job_id)
        assert await letters.replay(await letters.page()) == [Outcome.REPLAYED]
        await refused(more)
        # An expired result makes room, too.
        await rig.finish(replica, 2)
        await broker.redis.zadd(broker.keys.client_expiry, {job.job_id: 1 for job in jobs})
        assert await rig.submission.submit_client(more, limit=NO_LIMIT) is Submitted.NEW
        assert await taken(rig) == {more.job_id: more.max_bytes}

        large = client_job(rig, "large", n=3, tokens=100_000)
        with pytest.raises(
            RequestError, match=r"3 samples of up to 100000 tokens, and the prompt, may take up to 4\.6 MiB, allowed"
        ) as error:
            await rig.submission.submit_client(large, limit=NO_LIMIT)
        assert error.value.errors[0]["field"] == "n"


async def test_what_training_has_taken_clients_cannot_add_to(own_broker: EmbeddedBroker, run_id: str) -> None:
    """This holds even if clients use little of their share; reserved memory of admitted jobs counts, too."""
    async with await Broker.connect(own_broker.url, run_id) as broker:
        rig = Rig(broker, 0, Submission(broker), GroupQueue(broker, fence=0))
        limit = 64 * 2**20
        await broker.redis.config_set("maxmemory", limit)
        while (await broker.redis.info("memory"))["used_memory"] < 0.4 * limit:
            await broker.redis.rpush("groups", b"x" * (limit // 1000))

        async def outcome(number: int) -> str:
            try:
                return await rig.submission.submit_client(client_job(rig, str(number), tokens=20_000), limit=NO_LIMIT)
            except OverloadedError as error:
                return str(error)

        outcomes = Counter([await outcome(number) for number in range(30)])
        used = (await broker.redis.info("memory"))["used_memory"]
        full = "the broker's memory (its maxmemory) would be 50% full, the rest is for training"
        assert outcomes == {Submitted.NEW: outcomes[Submitted.NEW], full: outcomes[full]}
        assert min(outcomes.values()) > 1
        assert used + sum((await taken(rig)).values()) < (CLIENT_MEMORY_SHARE + 0.01) * limit


async def test_books_that_have_drifted_mend_themselves(rig: Rig) -> None:
    """The accounts drift after a rolling update from a version without them, or after manual writes."""
    redis, keys = rig.broker.redis, rig.broker.keys
    living = client_job(rig, "living")
    await rig.submission.submit_client(living, limit=NO_LIMIT)
    for key in (keys.client_reserved, keys.client_held):
        for i in range(30):
            await redis.hset(key, f"gone-{i}", 10**6)
        await redis.hincrby(key, ":total", 30 * 10**6)
    await redis.hset(keys.client_held, ":dead:1-1", 10**6)
    await redis.hincrby(keys.client_held, ":total", 10**6)
    registry, beat = ReplicaRegistry(rig.broker), ReplicaBeat("a", ReplicaState.SERVING, f"{rig.run_id}:0:aa", 0)

    async def mended() -> bool:
        await registry.beat(beat)
        return await redis.hlen(keys.client_reserved) == 2 and await redis.hlen(keys.client_held) == 1

    await until_async(mended)
    assert await redis.hgetall(keys.client_held) == {b":total": b"0"}
    size = str(living.max_bytes).encode()
    assert await redis.hgetall(keys.client_reserved) == {b"living": size, b":total": size}


async def test_a_caller_leaves_as_many_places_as_it_takes(rig: Rig) -> None:
    """Only waiting jobs count, however many of the caller's jobs run."""
    submission = rig.submission
    for number in range(4):
        await submission.submit_client(client_job(rig, f"a{number}"), limit=8, caller="alice")

    async def refused(name: str, caller: str, message: str) -> None:
        with pytest.raises(OverloadedError, match=message):
            await submission.submit_client(client_job(rig, name), limit=8, caller=caller)

    await refused(
        "a4",
        "alice",
        r"^4 jobs of alice wait for a replica, and 4 places of 8 \(max_queued\) are free: nobody takes more",
    )
    await submission.submit_client(client_job(rig, "b0"), limit=8, caller="bob")
    await submission.submit_client(client_job(rig, "b1"), limit=8, caller="bob")
    await refused("b2", "bob", "^2 jobs of bob wait for a replica, and 2 places of 8")
    replica = rig.replica("a", clients=True)
    done, failed, back, deleted = await replica.claim(4, BLOCK_MS)
    assert [lease.job.job_id for lease in (done, failed, back, deleted)] == ["a0", "a1", "a2", "a3"]
    for name in ("a4", "a5", "a6"):
        await submission.submit_client(client_job(rig, name), limit=8, caller="alice")
    await refused("a7", "alice", "^3 jobs of alice wait for a replica, and 3 places")
    await replica.commit(done, make_group(done.job))
    await replica.fail(failed, "boom", fatal=True)
    await submission.delete("a3", caller="alice")
    await refused("a7", "alice", "^3 jobs of alice wait for a replica, and 3 places")
    await replica.release(back)
    await refused("a7", "alice", "^4 jobs of alice wait for a replica, and 2 places")
    await submission.delete("a4", caller="alice")
    # A caller without a name has only the limit of all callers together.
    for number in range(3):
        await submission.submit_client(client_job(rig, f"n{number}"), limit=8)
    await refused("n3", "", "^8 jobs already wait")
    await refused("c0", "carol", "^8 jobs already wait")
    assert await submission.submit_client(client_job(rig, "b1"), limit=8, caller="bob") is Submitted.QUEUED
    # A caller without waiting jobs may take the last place.
    await submission.delete("n2")
    await submission.submit_client(client_job(rig, "c0"), limit=8, caller="carol")


async def test_a_caller_leaves_as_much_memory_as_it_takes(own_broker: EmbeddedBroker, run_id: str) -> None:
    async with await Broker.connect(own_broker.url, run_id) as broker:
        rig = Rig(broker, 0, Submission(broker), GroupQueue(broker, fence=0))
        jobs = {name: client_job(rig, name, tokens=100_000) for name in ("a0", "a1", "b0", "b1")}
        await broker.redis.config_set("maxmemory", int(3.5 * jobs["a0"].max_bytes / CLIENT_SHARE))
        large = client_job(rig, "large", tokens=200_000)
        half = r"allowed: 2\.7 MiB for one caller, half of what all have together \(25% of the broker's maxmemory\)"
        with pytest.raises(RequestError, match=half):
            await rig.submission.submit_client(large, limit=NO_LIMIT, caller="alice")

        async def submit(name: str, caller: str) -> Submitted:
            return await rig.submission.submit_client(jobs[name], limit=NO_LIMIT, caller=caller)

        await submit("a0", "alice")
        message = (
            r"^jobs and sessions of alice use or have reserved 1\.5 MiB, 3\.8 MiB of the clients' share \(25% of the "
            r"broker's maxmemory\) are free, and this may take up to 1\.5 MiB"
        )
        with pytest.raises(OverloadedError, match=message):
            await submit("a1", "alice")
        await submit("b0", "bob")
        # A result counts with its actual size, not its bound; a dead letter is its caller's before and after a replay.
        replica = rig.replica("a", clients=True)
        lease, other = await replica.claim(2, BLOCK_MS)
        await replica.commit(lease, make_group(lease.job))
        await submit("a1", "alice")
        await replica.fail(other, "boom", fatal=True)
        letters = DeadLetters(broker)
        assert await letters.replay(await letters.page()) == [Outcome.REPLAYED]
        with pytest.raises(OverloadedError, match=r"^jobs and sessions of bob use"):
            await submit("b1", "bob")
        # An expired result counts for nobody.
        before = await broker.redis.hget(broker.keys.client_callers, ":bytes:alice")
        await broker.redis.delete(broker.keys.job("a0"), broker.keys.result("a0"))
        await broker.redis.zadd(broker.keys.client_expiry, {"a0": 1})
        with pytest.raises(OverloadedError):
            await submit("b1", "bob")
        after = await broker.redis.hget(broker.keys.client_callers, ":bytes:alice")
        assert int(before or 0) > int(after or 0) == jobs["a1"].max_bytes


async def test_a_caller_sees_its_own_jobs_only(rig: Rig) -> None:
    await rig.submission.submit_client(client_job(rig, "job"), limit=NO_LIMIT, caller="alice")
    with pytest.raises(RequestError, match=r"^job job is another caller's$"):
        await rig.submission.submit_client(client_job(rig, "job"), limit=NO_LIMIT, caller="bob")

    async def hidden(caller: str) -> None:
        for what in (rig.submission.status, rig.submission.delete):
            with pytest.raises(NotFoundError, match="never submitted"):
                await what("job", caller=caller)

    await hidden("bob")
    replica, letters = rig.replica("a", clients=True), DeadLetters(rig.broker)
    (lease,) = await replica.claim(1, BLOCK_MS)
    await replica.fail(lease, "boom", fatal=True)
    await hidden("bob")
    assert (await rig.submission.status("job", caller="alice")).state is JobState.DEAD
    # The job's hash expires before the letter does.
    await rig.broker.redis.delete(rig.broker.keys.job("job"))
    await letters.replay(await letters.page())
    await hidden("bob")
    await rig.finish(replica, 1)
    await hidden("bob")
    for caller in ("alice", ""):
        assert (await rig.submission.status("job", caller=caller)).state is JobState.DONE
    assert await rig.submission.delete("job", caller="alice") is JobState.DONE
    # A caller without a name sees all jobs; no named caller sees its jobs.
    await rig.submission.submit_client(client_job(rig, "job"), limit=NO_LIMIT)
    await hidden("alice")
    # The trainer's jobs are hidden from callers.
    (train,) = await rig.submit(1)
    for what in (rig.submission.status, rig.submission.delete):
        with pytest.raises(NotFoundError, match="never submitted"):
            await what(train.job_id, caller="alice")
    # An older version wrote no caller.
    await rig.broker.redis.hdel(rig.broker.keys.job("job"), "caller")
    assert (await rig.submission.status("job", caller="alice")).state is JobState.QUEUED


async def test_an_id_that_is_another_callers_by_now_shows_nothing(rig: Rig) -> None:
    """The job is deleted and its id submitted by another caller between the calls of status and result."""
    replica = rig.replica("a", clients=True)
    for caller in ("alice", "bob"):
        await rig.submission.submit_client(client_job(rig, "job"), limit=NO_LIMIT, caller=caller)
        await rig.finish(replica, 1)
        assert (await rig.submission.status("job", caller=caller)).state is JobState.DONE
        assert (await rig.submission.result("job", caller=caller)).job_id == "job"
        if caller == "alice":
            await rig.submission.delete("job", caller=caller)
    with pytest.raises(NotFoundError, match="never submitted"):
        await rig.submission.result("job", caller="alice")


async def test_rows_that_are_left_stay_their_callers(rig: Rig) -> None:
    """More results expired than are cleared at once, so rows are left when a dead job with the same id is replayed."""
    redis, keys = rig.broker.redis, rig.broker.keys
    replica, letters = rig.replica("a", clients=True), DeadLetters(rig.broker)
    await rig.submission.submit_client(client_job(rig, "job"), limit=NO_LIMIT, caller="alice")
    (lease,) = await replica.claim(1, BLOCK_MS)
    await replica.fail(lease, "boom", fatal=True)
    await redis.hset(keys.client_callers, mapping={"job": "bob", ":bytes:bob": 500})
    await redis.hset(keys.client_held, "job", 500)
    await redis.hincrby(keys.client_held, ":total", 500)
    assert await letters.replay(await letters.page()) == [Outcome.REPLAYED]
    found = {name: value for name, value in (await redis.hgetall(keys.client_callers)).items() if value != b"0"}
    size = str(client_job(rig, "job").max_bytes).encode()
    assert found == {b"job": b"alice", b":bytes:alice": size, b":jobs:alice": b"1"}


async def test_what_an_older_version_did_not_count_goes_when_nobody_is_there(rig: Rig) -> None:
    await rig.broker.redis.hset(rig.broker.keys.client_callers, mapping={":bytes:alice": 10**9, ":jobs:alice": 7})
    await rig.submission.submit_client(client_job(rig, "job"), limit=4, caller="alice")
    found = await rig.broker.redis.hgetall(rig.broker.keys.client_callers)
    size = str(client_job(rig, "job").max_bytes).encode()
    assert found == {b"job": b"alice", b":bytes:alice": size, b":jobs:alice": b"1"}


async def test_a_letter_too_large_for_the_clients_share_is_not_replayed(
    own_broker: EmbeddedBroker, run_id: str
) -> None:
    async with await Broker.connect(own_broker.url, run_id) as broker:
        rig = Rig(broker, 0, Submission(broker), GroupQueue(broker, fence=0))
        await rig.submission.submit_client(client_job(rig, "large", tokens=1_000_000), limit=NO_LIMIT)
        replica, letters = rig.replica("a", clients=True), DeadLetters(broker)
        (lease,) = await replica.claim(1, BLOCK_MS)
        await replica.fail(lease, "boom", fatal=True)
        await broker.redis.config_set("maxmemory", 32 * 2**20)
        assert await letters.replay(await letters.page()) == [Outcome.LARGE]
        await broker.redis.config_set("maxmemory", 0)
        assert await letters.replay(await letters.page()) == [Outcome.REPLAYED]


def client_job(rig: Rig, name: str, *, n: int = 1, tokens: int = 4) -> Job:
    job = make_job(rig.run_id, sink=Sink.CLIENT)
    sampling = job.sampling.model_copy(update={"max_tokens": tokens})
    return job.model_copy(update={"job_id": name, "n": n, "sampling": sampling})


async def taken(rig: Rig) -> dict[str, int]:
    return {job.name: job.num_bytes for job in await client_jobs(rig.broker)}


@pytest.fixture
async def full(own_broker: EmbeddedBroker, run_id: str) -> Rig:
    """A run with three queued jobs on a broker of its own, whose memory the test fills up."""
    broker = await Broker.connect(own_broker.url, run_id)
    fence = await TrainerLease(broker, "test").acquire()
    rig = Rig(broker, fence, Submission(broker), GroupQueue(broker, fence=fence))
    await rig.submit(3)
    return rig


@pytest.mark.parametrize("share", [0.75, 1.5])
async def test_with_the_memory_full_admission_stops_and_draining_goes_on(full: Rig, share: float) -> None:
    used = (await full.broker.redis.info("memory"))["used_memory"]
    await full.broker.redis.config_set("maxmemory", int(used / share))
    fresh = make_job(full.run_id, 100)
    assert await full.submission.submit([fresh], fence=full.fence, limit=NO_LIMIT) == [Submitted.REFUSED]
    with pytest.raises(OverloadedError, match="memory"):
        await full.submission.submit_client(make_job(full.run_id, sink=Sink.CLIENT), limit=NO_LIMIT)
    # A replica and a trainer that start at this point can connect and drain.
    broker = await Broker.connect(_url(full.broker), full.run_id)
    replica = full.replica("late", max_deliveries=1)
    done, dying, back = await replica.claim(3, BLOCK_MS)
    await replica.commit(done, make_group(done.job))
    await replica.fail(dying, "boom")
    await replica.release(back)
    deliveries = await full.groups.read(9, BLOCK_MS)
    assert {delivery.job_id for delivery in deliveries} == {done.job.job_id, dying.job.job_id}
    await full.groups.settle(trained=[done.job.job_id])
    await full.groups.acknowledge(deliveries)
    assert await full.length(full.broker.keys.groups) == 0
    await broker.close()
    await full.broker.close()


def _url(broker: Broker) -> str:
    options = broker.redis.connection_pool.connection_kwargs
    return f"redis://:{options['password']}@{options['host']}:{options['port']}/0"
