"""The audit records who changed a run."""

from __future__ import annotations

import time

from dvp_rl.contract.job import JobState, Sink
from dvp_rl.contract.weights import Announcement
from dvp_rl.transport import broker as limits
from dvp_rl.transport.audit import changes
from dvp_rl.transport.dead_letters import DeadLetters
from dvp_rl.transport.runs import close_queue, open_queue, purge_run
from dvp_rl.weights.registry import WeightRegistry
from tests.integration.transport.rig import BLOCK_MS, Rig
from tests.kit.records import make_job

ALICE = "operate/alice (dvp-monitor)"


async def kill(rig: Rig, count: int) -> list[str]:
    """Kills `count` jobs; returns their ids, oldest first."""
    jobs = await rig.submit(count)
    replica = rig.replica("a")
    for lease in await replica.claim(count, BLOCK_MS):
        await replica.fail(lease, "an error", fatal=True)
    return [job.job_id for job in jobs]


async def told(rig: Rig) -> list[tuple[str, str, str]]:
    """All recorded (author, action, object), oldest first."""
    return [change[1:] for change in reversed(await changes(rig.broker, 1000))]


async def test_letters_name_who_replayed_and_dropped_them(rig: Rig) -> None:
    ids = await kill(rig, 3)
    letters = DeadLetters(rig.broker, by=ALICE)
    oldest, *others = reversed(await letters.page())
    for _ in range(3):  # a retry whose reply was lost changes nothing
        await letters.replay([oldest])
    entries = [letter.entry_id for letter in others]
    for _ in range(3):
        await letters.drop(entries)
    assert await told(rig) == [(ALICE, "replayed", ids[0]), (ALICE, "dropped", ", ".join(ids[1:]))]


async def test_many_are_one_line(rig: Rig) -> None:
    ids = await kill(rig, 12)
    letters = DeadLetters(rig.broker, by=ALICE)
    await letters.replay([letter async for page in letters.pages() for letter in page])
    assert await told(rig) == [(ALICE, "replayed", f"{', '.join(ids[:10])} and 2 more")]


async def test_a_damaged_letter_is_named_by_its_entry(rig: Rig) -> None:
    entry = (await rig.broker.redis.xadd(rig.broker.keys.dead, {"kind": "dead", "id": "", "sink": "train"})).decode()
    await DeadLetters(rig.broker, by=ALICE).drop([entry])
    assert await told(rig) == [(ALICE, "dropped", f"letter {entry}")]


async def test_what_was_left_alone_is_no_change(rig: Rig) -> None:
    await kill(rig, 1)
    await rig.groups.read(1, BLOCK_MS)  # the trainer has counted it
    letters = DeadLetters(rig.broker, by=ALICE)
    await letters.replay(await letters.page())
    await letters.drop(["1-1"])
    await open_queue(rig.broker, by=ALICE)
    assert await told(rig) == []


async def test_the_queue_and_results_name_who_closed_and_deleted_them(rig: Rig) -> None:
    for _ in range(2):
        await close_queue(rig.broker, "a new disk", by=ALICE)
    for _ in range(2):
        await open_queue(rig.broker, by=ALICE)
    for name in ("mine", "theirs"):
        await rig.submission.submit_client(
            make_job(rig.run_id, sink=Sink.CLIENT).model_copy(update={"job_id": name}), limit=9
        )
    assert await rig.submission.delete("mine") is JobState.QUEUED  # a client's own deletion is not recorded
    await rig.submission.delete("theirs", by=ALICE)
    assert await told(rig) == [
        (ALICE, "closed", "the queue: a new disk"),
        (ALICE, "opened", "the queue"),
        (ALICE, "deleted", "theirs"),
    ]


async def test_weights_name_the_trainer(rig: Rig) -> None:
    registry = WeightRegistry(rig.broker)
    before = time.time()
    announcement = Announcement(version=f"{rig.run_id}:1:ab", step=1, folder="/weights", min_seq=0, announced_at=before)
    for _ in range(2):
        await registry.announce(announcement, fence=rig.fence)
    holder, host, pid = (
        value.decode() for value in await rig.broker.redis.hmget(rig.broker.keys.lease, "holder", "host", "pid")
    )
    assert await told(rig) == [(f"{holder} (host {host}, pid {pid})", "published", announcement.version)]
    await rig.broker.redis.delete(rig.broker.keys.lease)
    await registry.announce(announcement.model_copy(update={"version": f"{rig.run_id}:2:cd"}), fence=rig.fence)
    (newest,) = await changes(rig.broker, 1)
    assert (newest.by, newest.what) == ("a trainer whose lease had run out", f"{rig.run_id}:2:cd")


async def test_a_purge_does_not_hide_what_came_before_it(rig: Rig) -> None:
    (job_id,) = await kill(rig, 1)
    letters = DeadLetters(rig.broker, by=ALICE)
    await letters.drop([letter.entry_id for letter in await letters.page()])
    for _ in range(2):
        await purge_run(rig.broker, by="bob", force=True)
    assert await told(rig) == [
        (ALICE, "dropped", job_id),
        ("bob", "purged", "the run, whoever worked on it"),
    ]


async def test_it_is_bounded(rig: Rig) -> None:
    for number in range(limits.AUDIT_LENGTH + 3):
        await close_queue(rig.broker, f"{number}", by=ALICE)
    seen = await told(rig)
    assert len(seen) == limits.AUDIT_LENGTH
    assert seen[-1] == (ALICE, "closed", f"the queue: {limits.AUDIT_LENGTH + 2}")
    await close_queue(rig.broker, "x" * 10**6, by="y" * 10**6)
    (newest,) = await changes(rig.broker, 1)
    assert (len(newest.by), len(newest.what)) == (limits.AUDIT_BYTES, limits.AUDIT_BYTES)
    left_s = await rig.broker.redis.ttl(rig.broker.keys.audit)
    assert 0 < left_s <= limits.AUDIT_TTL_S
