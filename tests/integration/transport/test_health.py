"""The queue's numbers and verdict: each rule fires on a real broker in the situation that it describes."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from dvp_rl.contract.http import QueueHealth, ReplicaHealth, ReplicaState, StreamHealth, TrainerHealth, Verdict
from dvp_rl.contract.job import Sink
from dvp_rl.contract.session import Ending, Fork, Session
from dvp_rl.contract.weights import Announcement
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.health import (
    CLIENTS_WAIT_S,
    LOST_S,
    MISSED_S,
    QUIET_S,
    RULES,
    STALLED_S,
    STARVED_S,
    Snapshot,
    judge,
    queue_health,
    take_snapshot,
)
from dvp_rl.transport.pending import Stream, pending
from dvp_rl.transport.replicas import BACKLOG_EVERY_S, BEAT_S, NUM_BACKLOGS, ReplicaBeat, ReplicaRegistry, TrainerBeat
from dvp_rl.transport.retention import sweep_broker
from dvp_rl.transport.sessions import SessionStore, open_sessions
from dvp_rl.weights.registry import WeightRegistry
from tests.integration.transport.rig import BLOCK_MS, NO_LIMIT, SHORT_LEASE_MS, Harness, Rig
from tests.kit.records import make_group, make_job, make_turn
from tests.kit.wait import until_async


async def _beat(rig: Rig, name: str = "a", *, seq: int = 0, loading: str = "", wrong: str = "") -> None:
    version = f"{rig.run_id}:{seq}:ab"
    beat = ReplicaBeat(name, ReplicaState.SERVING, version, in_flight=2, capacity=8, loading=loading, wrong=wrong)
    await ReplicaRegistry(rig.broker).beat(beat)


async def _beat_trainer(rig: Rig, *, waiting_s: float = 0.0, scoring: int = 0) -> None:
    beat = TrainerBeat(step=3, version=f"{rig.run_id}:0:ab", waiting_s=waiting_s, scoring=scoring)
    await ReplicaRegistry(rig.broker).beat_trainer(beat, fence=rig.fence)


async def _age_replica(rig: Rig, name: str, seconds: float) -> None:
    """Makes a replica silent for `seconds`."""
    await rig.broker.redis.zincrby(rig.broker.keys.replicas, -seconds * 1000, name)


async def _came_earlier(rig: Rig, seconds: float, *names: str) -> None:
    for name in names:
        await rig.broker.redis.hincrby(rig.broker.keys.replica(name), "since", -int(seconds * 1000))


async def _age_jobs(rig: Rig, stream: str, seconds: float) -> None:
    """Adds every entry of a stream again with an older time."""
    for entry_id, fields in await rig.broker.redis.xrange(stream):
        await rig.broker.redis.xadd(stream, fields | {b"at": int(fields[b"at"]) - int(seconds * 1000)})
        await rig.broker.redis.xdel(stream, entry_id)


async def _came_long_ago(rig: Rig, stream: str, seconds: float) -> None:
    """Ages unread entries like _age_jobs, and also their entry ids, which hold the time of arrival."""
    await _age_jobs(rig, stream, seconds)
    entries = await rig.broker.redis.xrange(stream)
    await rig.broker.redis.delete(stream)
    for entry_id, fields in entries:
        milliseconds, number = entry_id.decode().split("-")
        await rig.broker.redis.xadd(stream, fields, id=f"{int(milliseconds) - int(seconds * 1000)}-{number}")
    await rig.broker.ensure_groups()


async def _health(rig: Rig) -> QueueHealth:
    health = await queue_health(rig.broker)
    assert health.verdict == (health.reasons[0].verdict if health.reasons else Verdict.OK)
    assert all(reason.detail and reason.remedy for reason in health.reasons)
    return health


async def test_the_numbers_of_one_run(rig: Rig) -> None:
    await rig.submit(6)
    replica = rig.replica("a")
    (gone, back, done) = await replica.claim(3, BLOCK_MS)
    await replica.fail(gone, "boom", fatal=True)
    await replica.fail(back, "boom")
    await replica.commit(done, make_group(done.job))
    await rig.finish(replica, 2)
    await rig.groups.read(2, BLOCK_MS)
    await rig.groups.settle(trained=[done.job.job_id])
    await replica.claim(1, BLOCK_MS)
    await _beat(rig)
    await _beat_trainer(rig)
    health = await _health(rig)
    assert (health.jobs.backlog, health.jobs.pending, health.jobs.redelivered) == (1, 1, 1)
    assert (health.groups.backlog, health.groups.pending, health.groups.redelivered) == (2, 2, 0)
    assert (health.in_flight, health.uncheckpointed, health.dead, health.duplicates) == (4, 1, 1, 0)
    (seen,) = health.replicas
    assert (seen.id, seen.state, seen.version, seen.in_flight) == ("a", ReplicaState.SERVING, f"{rig.run_id}:0:ab", 2)
    assert health.trainer is not None
    assert (health.trainer.step, health.trainer.version) == (3, f"{rig.run_id}:0:ab")
    for age in (health.jobs.oldest_age_s, health.groups.oldest_age_s, seen.last_seen_s, health.trainer.last_seen_s):
        assert age is not None
        assert 0 <= age < 60


async def test_backlog_is_exact_after_out_of_order_deletes(rig: Rig) -> None:
    await rig.submit(5)
    replica = rig.replica("a")
    leases = await replica.claim(4, BLOCK_MS)
    for lease in (leases[2], leases[0]):
        await replica.commit(lease, make_group(lease.job))
    health = await _health(rig)
    assert (health.jobs.backlog, health.jobs.pending) == (1, 2)


async def test_an_empty_run_is_idle(rig: Rig) -> None:
    await _beat(rig)
    health = await _health(rig)
    assert health.verdict is Verdict.IDLE
    assert health.jobs == StreamHealth(backlog=0, pending=0, oldest_age_s=None, redelivered=0)
    assert health.trainer is None


async def test_a_busy_run_is_ok(rig: Rig) -> None:
    await _beat(rig)
    await _beat_trainer(rig)
    await rig.submit(3)
    assert (await _health(rig)).verdict is Verdict.OK


async def test_no_replicas(rig: Rig) -> None:
    await rig.submit(2)
    await _beat_trainer(rig)
    health = await _health(rig)
    assert health.verdict is Verdict.NO_REPLICAS
    assert "2 jobs wait" in health.reasons[0].detail
    await _beat(rig)
    assert (await _health(rig)).verdict is Verdict.OK
    await _age_replica(rig, "a", LOST_S + 1)
    health = await _health(rig)
    assert health.verdict is Verdict.NO_REPLICAS
    assert health.replicas[0].state is ReplicaState.LOST
    assert "a (lost" in health.reasons[0].detail


async def test_no_trainer(rig: Rig) -> None:
    await _beat(rig)
    await rig.submit(2)
    health = await _health(rig)
    assert health.verdict is Verdict.NO_TRAINER
    assert "never seen, with 0 groups waiting and 2 jobs in flight" in health.reasons[0].detail
    await _beat_trainer(rig)
    await rig.broker.redis.hincrby(rig.broker.keys.trainer, "at", -int(LOST_S + 1) * 1000)
    assert re.search(r"last seen \d\d s ago", (await _health(rig)).reasons[0].detail)


async def test_clients_need_no_trainer(rig: Rig) -> None:
    await _beat(rig)
    await rig.submission.submit_client(make_job(rig.run_id, sink=Sink.CLIENT), limit=1)
    assert (await _health(rig)).verdict is Verdict.OK


async def test_stalled(rig: Rig) -> None:
    await _beat(rig)
    await _beat_trainer(rig)
    await rig.submit(2)
    await rig.finish(rig.replica("a"), 1)
    await _age_jobs(rig, rig.broker.keys.jobs, STALLED_S + 10)
    assert (await _health(rig)).verdict is Verdict.OK
    await rig.broker.redis.hincrby(rig.broker.keys.counters, "committed_at", -int(STALLED_S + 5) * 1000)
    health = await _health(rig)
    assert health.verdict is Verdict.STALLED
    assert "a (serving" in health.reasons[0].detail


async def test_replicas_with_wrong_weights(rig: Rig) -> None:
    await _beat(rig, "right")
    await _beat(rig, "liar", wrong="7 of 8 safe sets have another size")
    await _beat_trainer(rig)
    health = await _health(rig)
    assert health.verdict is Verdict.WRONG_WEIGHTS
    assert {replica.id: replica.wrong for replica in health.replicas} == {
        "right": "",
        "liar": "7 of 8 safe sets have another size",
    }
    assert "1 of 2 replicas: liar (" in health.reasons[0].detail
    assert "7 of 8 safe sets" in health.reasons[0].detail
    await _beat(rig, "liar")
    assert (await _health(rig)).verdict is Verdict.IDLE


async def test_replicas_behind(rig: Rig) -> None:
    await _beat(rig, "old", seq=1)
    await _beat(rig, "new", seq=3)
    await _beat_trainer(rig)
    await rig.submit(1)
    version = f"{rig.run_id}:3:ab"
    announcement = Announcement(version=version, step=3, folder="/weights", min_seq=2, announced_at=1.0)
    await WeightRegistry(rig.broker).announce(announcement, fence=rig.fence)
    health = await _health(rig)
    assert health.verdict is Verdict.REPLICAS_BEHIND
    assert "1 of 2" in health.reasons[0].detail
    assert "old" in health.reasons[0].detail
    assert version in health.reasons[0].detail
    await _age_replica(rig, "old", 2 * BEAT_S + 0.5)
    assert (await _health(rig)).verdict is Verdict.OK, "it may have been killed"


async def test_replicas_lost(rig: Rig) -> None:
    await _beat(rig, "here")
    await _beat(rig, "gone")
    await _came_earlier(rig, MISSED_S * 2, "here", "gone")
    await _beat_trainer(rig)
    await rig.submit(1)
    await _age_replica(rig, "gone", LOST_S + 1)
    health = await _health(rig)
    assert health.verdict is Verdict.REPLICAS_LOST
    assert "1 of 2" in health.reasons[0].detail
    assert "gone (lost" in health.reasons[0].detail
    await _age_replica(rig, "gone", MISSED_S)
    assert (await _health(rig)).verdict is Verdict.OK


async def test_replicas_that_came_back_under_another_name_are_not_missed(rig: Rig) -> None:
    for name in ("here", "gone", "too"):
        await _beat(rig, name)
        await _came_earlier(rig, MISSED_S, name)
    await _beat_trainer(rig)
    await rig.submit(1)
    for name in ("gone", "too"):
        await _age_replica(rig, name, LOST_S + 1)
    assert "2 of 3" in (await _health(rig)).reasons[0].detail
    await _beat(rig, "another")
    assert "1 of 3" in (await _health(rig)).reasons[0].detail
    await _beat(rig, "one more")
    assert (await _health(rig)).verdict is Verdict.OK
    await _came_earlier(rig, LOST_S + 5, "another", "one more")
    assert "2 of 5" in (await _health(rig)).reasons[0].detail, "those were there before"


async def test_growing_backlog(rig: Rig) -> None:
    await _beat_trainer(rig)
    for length in (1, 1, 3, 3, 2, 5, 6, 8, 7, 9, 12):
        await rig.submission.submit(
            [make_job(rig.run_id, number) for number in range(length)], fence=rig.fence, limit=NO_LIMIT
        )
        await _let_time_pass(rig)
        await _beat(rig)
    assert len((await take_snapshot(rig.broker)).backlogs) == NUM_BACKLOGS
    health = await _health(rig)
    assert health.verdict is Verdict.GROWING_BACKLOG
    assert "12 jobs wait" in health.reasons[0].detail
    await _beat(rig)
    assert (await take_snapshot(rig.broker)).backlogs[-1] == 12, "measured once per interval"
    await rig.finish(rig.replica("a"), 11)
    await _let_time_pass(rig)
    await _beat(rig)
    assert Verdict.GROWING_BACKLOG not in {reason.verdict for reason in (await _health(rig)).reasons}


async def _let_time_pass(rig: Rig) -> None:
    """Ages the measurements of the backlog by one interval."""
    key = rig.broker.keys.backlogs
    entries = await rig.broker.redis.xrange(key)
    await rig.broker.redis.delete(key)
    for entry_id, fields in entries:
        await rig.broker.redis.xadd(key, fields, id=int(entry_id.split(b"-")[0]) - int(BACKLOG_EVERY_S * 1000))


async def test_a_finished_run_misses_no_trainer(rig: Rig) -> None:
    await _beat(rig)
    await rig.submit(1)
    await rig.finish(rig.replica("a"), 1)
    await _age_jobs(rig, rig.broker.keys.groups, STARVED_S + 1)
    beat = TrainerBeat(step=9, version=f"{rig.run_id}:0:ab", finished=1)
    await ReplicaRegistry(rig.broker).beat_trainer(beat, fence=rig.fence)
    await rig.broker.redis.hincrby(rig.broker.keys.trainer, "at", -int(LOST_S + 1) * 1000)
    health = await _health(rig)
    assert health.verdict is Verdict.IDLE
    assert "the run is finished" in health.reasons[0].detail


async def test_dead_letters(rig: Rig) -> None:
    await _beat(rig)
    await _beat_trainer(rig)
    await rig.submit(2)
    replica = rig.replica("a")
    (lease,) = await replica.claim(1, BLOCK_MS)
    await replica.fail(lease, "boom", fatal=True)
    assert (await _health(rig)).verdict is Verdict.DEAD_LETTERS


async def test_trainer_starved(rig: Rig) -> None:
    await _beat(rig)
    await rig.submit(2)
    await _beat_trainer(rig, waiting_s=STARVED_S - 1)
    assert (await _health(rig)).verdict is Verdict.OK
    await _beat_trainer(rig, waiting_s=STARVED_S + 1)
    assert (await _health(rig)).verdict is Verdict.TRAINER_STARVED


async def test_slow_rewards_are_not_blamed_on_the_replicas(rig: Rig) -> None:
    await _beat(rig)
    await rig.submit(2)
    await _beat_trainer(rig, waiting_s=STARVED_S + 1, scoring=8)
    health = await _health(rig)
    assert [reason.verdict for reason in health.reasons] == [Verdict.REWARDS_SLOW]
    assert "8 completions await their rewards" in health.reasons[0].detail
    await _beat_trainer(rig, waiting_s=STARVED_S - 1, scoring=8)
    assert (await _health(rig)).verdict is Verdict.OK


async def test_replicas_starved(rig: Rig) -> None:
    await _beat(rig)
    await _beat_trainer(rig)
    await rig.submit(2)
    await rig.finish(rig.replica("a"), 2)
    assert (await _health(rig)).verdict is Verdict.OK
    await _age_jobs(rig, rig.broker.keys.groups, STARVED_S + 1)
    assert (await _health(rig)).verdict is Verdict.REPLICAS_STARVED


async def _wait_for_harness(rig: Rig, seconds: float, *, quiet_s: float) -> None:
    """Lets all waiting episodes have waited for so long, and harnesses have done nothing for `quiet_s`."""
    redis, keys = rig.broker.redis, rig.broker.keys
    for name, free_at in await redis.zrange(keys.episodes, 0, -1, withscores=True):
        await redis.zadd(keys.episodes, {name: free_at - int(1000 * seconds)})
    if await redis.hexists(keys.counters, "harness_at"):
        await redis.hincrby(keys.counters, "harness_at", -int(1000 * quiet_s))


async def test_a_run_without_episodes_has_none(rig: Rig) -> None:
    await rig.submit(1)
    health = await _health(rig)
    assert health.episodes is None
    assert health.client_sessions == 0


async def test_no_harness(rig: Rig) -> None:
    await _beat(rig)
    await _beat_trainer(rig, waiting_s=STARVED_S + 1)
    await rig.submit_episodes(n=3)
    assert (await _health(rig)).verdict is Verdict.HARNESSES_SLOW, "one may come any moment"
    await _wait_for_harness(rig, QUIET_S + 1, quiet_s=0)
    health = await _health(rig)
    assert [reason.verdict for reason in health.reasons] == [Verdict.NO_HARNESS]
    seen = r"3 episodes wait and 0 are played, but no harness has done anything for \d+ s"
    assert re.fullmatch(seen, health.reasons[0].detail)
    harness = Harness(rig.broker)
    await harness.play(await harness.taken())
    assert (await _health(rig)).verdict is Verdict.HARNESSES_SLOW, "it plays one after the other"
    await _wait_for_harness(rig, 0, quiet_s=QUIET_S + 1)
    assert (await _health(rig)).verdict is Verdict.NO_HARNESS
    await _age_replica(rig, "a", LOST_S + 1)
    assert Verdict.NO_HARNESS not in {reason.verdict for reason in (await _health(rig)).reasons}, "none could play"
    await _beat(rig)
    await harness.taken()
    assert (await _health(rig)).verdict is Verdict.HARNESSES_SLOW


async def test_a_harness_that_waited_long_for_episodes_is_not_missed(rig: Rig) -> None:
    await _beat(rig)
    await _beat_trainer(rig)
    harness = Harness(rig.broker)
    await rig.submit_episodes(n=1)
    await harness.play(await harness.taken())
    await rig.submit_episodes(1)
    await _wait_for_harness(rig, 0, quiet_s=STALLED_S + 1)
    assert (await _health(rig)).verdict is Verdict.OK


async def test_a_harness_that_died_while_it_played_is_missed(rig: Rig) -> None:
    await _beat(rig)
    await _beat_trainer(rig)
    await rig.submit_episodes(n=2, idle_s=3600)
    await Harness(rig.broker).taken()
    await _wait_for_harness(rig, 0, quiet_s=STALLED_S - 100)
    assert (await _health(rig)).verdict is Verdict.OK
    await _wait_for_harness(rig, 0, quiet_s=200)
    health = await _health(rig)
    assert health.verdict is Verdict.NO_HARNESS
    assert "1 episodes wait and 1 are played" in health.reasons[0].detail


async def test_harnesses_slow(rig: Rig) -> None:
    await _beat(rig)
    await _beat_trainer(rig, waiting_s=STARVED_S + 1)
    await rig.submit_episodes(n=3)
    harness = Harness(rig.broker)
    await harness.taken()
    health = await _health(rig)
    assert [reason.verdict for reason in health.reasons] == [Verdict.HARNESSES_SLOW]
    assert "2 episodes wait for a harness, and 1 are being played" in health.reasons[0].detail
    for _ in range(2):
        await harness.taken()
    health = await _health(rig)
    assert [reason.verdict for reason in health.reasons] == [Verdict.TRAINER_STARVED]
    assert "; 3 episodes are queued or running" in health.reasons[0].detail
    await _beat_trainer(rig)
    assert (await _health(rig)).verdict is Verdict.OK


async def test_episodes_silent(rig: Rig) -> None:
    await _beat(rig)
    await _beat_trainer(rig)
    job = await rig.submit_episodes(n=2, idle_s=3600)
    harness = Harness(rig.broker)
    first, second = [await harness.taken() for _ in range(2)]
    health = await _health(rig)
    assert health.verdict is Verdict.OK
    assert health.episodes is not None
    assert (health.episodes.backlog, health.episodes.pending) == (0, 2)
    assert health.episodes.silent_s is not None
    assert health.episodes.silent_s < STALLED_S
    await _wait_for_harness(rig, STALLED_S + 1, quiet_s=0)
    await harness.say(first)
    health = await _health(rig)
    assert [reason.verdict for reason in health.reasons] == [Verdict.EPISODES_SILENT]
    who = rf"episode 1 of job {job.job_id} \(session {second.session_id}\)"
    for_how_long = r"3\d\d s of the 3600 s after which another harness gets it"
    seen = f"{who} has had no turn or heartbeat for {for_how_long}; played now: 2"
    assert re.fullmatch(seen, health.reasons[0].detail)
    await harness.say(second)
    assert (await _health(rig)).verdict is Verdict.OK


async def test_an_episode_is_silent_once_half_of_its_time_is_over(rig: Rig) -> None:
    await _beat(rig)
    await _beat_trainer(rig)
    await rig.submit_episodes(n=1, idle_s=3600)
    job = await rig.submit_episodes(1, n=1, idle_s=560)
    harness = Harness(rig.broker)
    for _ in range(2):
        await harness.taken()
    await _wait_for_harness(rig, 100, quiet_s=0)
    assert (await _health(rig)).verdict is Verdict.OK
    await _wait_for_harness(rig, 190, quiet_s=0)
    health = await _health(rig)
    assert health.verdict is Verdict.EPISODES_SILENT
    assert re.search(rf"job {job.job_id} .* for \d+ s of the 560 s", health.reasons[0].detail)


async def test_replicas_whose_episodes_are_played_are_not_starved(rig: Rig) -> None:
    await _beat(rig)
    await _beat_trainer(rig)
    await rig.submit(2)
    await rig.submit_episodes(position=2)
    await rig.finish(rig.replica("a"), 2)
    await _age_jobs(rig, rig.broker.keys.groups, STARVED_S + 1)
    await Harness(rig.broker).taken()
    assert (await _health(rig)).verdict is Verdict.OK


async def test_open_sessions_are_counted_and_listed(rig: Rig) -> None:
    """Clients' and episodes, until they are finished, deleted or forgotten."""
    store, harness = SessionStore(rig.broker), Harness(rig.broker, "harness")
    for number, idle_s in enumerate((6000, 5000, 4000, SHORT_LEASE_MS / 1000)):
        session = Session(session_id=f"client-{number}", run_id=rig.run_id, idle_s=idle_s)
        await store.open(session, caller="alice")
    job = await rig.submit_episodes(n=2, idle_s=4500)
    episode = await harness.taken()
    await harness.say(episode, num_tokens=4)
    recorded = await store.read("client-0")
    await store.append(recorded, make_turn("a", run_id=rig.run_id))
    await store.append(recorded, make_turn("b", run_id=rig.run_id, fork=Fork.DRIFT))

    async def listed() -> list[str]:
        return [session.session_id for session in await open_sessions(rig.broker, 9)]

    async def are_forgotten() -> bool:
        return (await _health(rig)).client_sessions == 3 and len(await listed()) == 4

    await until_async(are_forgotten)
    assert await listed() == ["client-2", episode.session_id, "client-1", "client-0"]
    _, played, _, client = await open_sessions(rig.broker, 9)
    assert (played.caller, played.job_id, played.sink, played.episode) == ("harness", job.job_id, "train", 0)
    assert (played.turns, played.branches, played.drifted, played.tokens) == (1, 1, 0, 5)
    assert 0 <= played.silent_s < 4500
    assert 0 < played.left_s <= 4500
    assert (client.caller, client.job_id, client.sink) == ("alice", "", "")
    assert (client.turns, client.branches, client.drifted, client.tokens) == (2, 2, 1, 6)
    assert client.num_bytes > 0
    assert [session.session_id for session in await open_sessions(rig.broker, 1)] == ["client-2"]
    await store.delete("client-2")
    await store.finish(await store.read("client-0"), Ending(1.0))
    await harness.finish(episode)
    assert await listed() == ["client-1"]
    assert (await _health(rig)).client_sessions == 1


async def test_a_clock_that_was_set_back_makes_no_episode_silent(rig: Rig) -> None:
    await rig.submit_episodes()
    await _wait_for_harness(rig, -5, quiet_s=0)
    episodes = (await _health(rig)).episodes
    assert episodes is not None
    assert (episodes.pending, episodes.silent_s) == (2, None)


async def test_broker_memory(own_broker: EmbeddedBroker, run_id: str) -> None:
    async with await Broker.connect(own_broker.url, run_id) as broker:
        used = (await broker.redis.info("memory"))["used_memory"]
        await broker.redis.config_set("maxmemory", int(used / 0.8))
        health = await queue_health(broker)
        assert health.verdict is Verdict.BROKER_MEMORY
        assert "maxmemory" in health.reasons[0].detail


async def test_jobs_of_clients_are_counted_apart(rig: Rig) -> None:
    await rig.submit(1)
    for position in range(3):
        await rig.submission.submit_client(make_job(rig.run_id, position, sink=Sink.CLIENT), limit=9)
    a, b = (rig.replica(name, clients=True, lease_ms=SHORT_LEASE_MS) for name in ("a", "b"))
    await a.claim(2, BLOCK_MS)
    assert len(await rig.expired(b, 1)) == 1
    snapshot = await take_snapshot(rig.broker)
    jobs, clients = snapshot.jobs, snapshot.client_jobs
    assert (jobs.backlog, jobs.pending, jobs.redelivered) == (1, 0, 0)
    assert (clients.backlog, clients.pending, clients.redelivered) == (1, 2, 1)
    assert (snapshot.num_waiting, snapshot.num_jobs) == (2, 4)
    assert snapshot.oldest_job_s == max(jobs.oldest_age_s or 0, clients.oldest_age_s or 0) > 0
    held = await pending(rig.broker, Stream.CLIENT_JOBS, 9)
    assert sorted(row.holder.partition("/")[0] for row in held) == ["a", "b"]
    # The backlog that a heartbeat measures is the sum of both queues.
    assert await ReplicaRegistry(rig.broker).beat(ReplicaBeat("a", ReplicaState.SERVING, f"{rig.run_id}:0:aa", 0))
    assert (await take_snapshot(rig.broker)).backlogs == (2,)


async def test_clients_wait(rig: Rig) -> None:
    """The wait is that of the next job that a replica would take, not of running jobs or of jobs that came later."""
    await _beat(rig)
    await _beat_trainer(rig)
    client_jobs, replica = rig.broker.keys.client_jobs, rig.replica("a", clients=True)
    assert (await take_snapshot(rig.broker)).client_wait_s == 0
    for position in range(3):
        await rig.submission.submit_client(make_job(rig.run_id, position, sink=Sink.CLIENT), limit=9)
    await _came_long_ago(rig, client_jobs, CLIENTS_WAIT_S + 1)
    assert (await take_snapshot(rig.broker)).client_wait_s > CLIENTS_WAIT_S
    assert (await _health(rig)).verdict is Verdict.OK, "no replica is at work on any: something else holds them up"
    await rig.submission.submit_client(make_job(rig.run_id, 3, sink=Sink.CLIENT), limit=9)
    (at_work,) = await replica.claim(1, BLOCK_MS)
    health = await _health(rig)
    assert health.verdict is Verdict.CLIENTS_WAIT
    waits = r"3 clients' jobs wait for a replica, the next for \d+ s; running in their share of 1 replicas: 1"
    assert re.fullmatch(waits, health.reasons[0].detail)
    await replica.claim(2, BLOCK_MS)
    assert (await _health(rig)).verdict is Verdict.OK
    snapshot = await take_snapshot(rig.broker)
    assert snapshot.client_wait_s < CLIENTS_WAIT_S < snapshot.oldest_job_s
    await replica.claim(1, BLOCK_MS)
    assert (await take_snapshot(rig.broker)).client_wait_s == 0
    # A released job starts to wait anew: before, it was running.
    await replica.release(at_work)
    snapshot = await take_snapshot(rig.broker)
    assert 0 <= snapshot.client_wait_s < CLIENTS_WAIT_S < snapshot.oldest_job_s
    await rig.broker.redis.delete(client_jobs)
    assert (await take_snapshot(rig.broker)).client_wait_s == 0


NOTHING = StreamHealth(backlog=0, pending=0, oldest_age_s=None, redelivered=0)
MUCH = StreamHealth(backlog=4, pending=1, oldest_age_s=STALLED_S + 1, redelivered=0)
SNAPSHOT = Snapshot(
    jobs=MUCH,
    client_jobs=NOTHING,
    groups=NOTHING,
    in_flight=5,
    uncheckpointed=0,
    dead=2,
    duplicates=0,
    replicas=(ReplicaHealth(id="a", state=ReplicaState.SERVING, version="run:1:ab", in_flight=0, last_seen_s=0.1),),
    trainer=TrainerHealth(step=1, version="run:1:ab", last_seen_s=0.1),
    trainer_waiting_s=STARVED_S + 1,
    newest_version="run:3:ab",
    min_seq=2,
    used_memory=8,
    maxmemory=10,
    disk_refuses=False,
    since_commit_s=None,
)


def test_clients_that_wait_are_told_of_beside_a_trainer_that_is_not_done() -> None:
    snapshot = replace(SNAPSHOT, client_jobs=MUCH, client_wait_s=CLIENTS_WAIT_S)

    def told(**changes: Any) -> bool:
        return Verdict.CLIENTS_WAIT in {reason.verdict for reason in judge(replace(snapshot, **changes)).reasons}

    assert told()
    assert not told(client_wait_s=CLIENTS_WAIT_S - 1)
    assert not told(client_jobs=MUCH.model_copy(update={"pending": 0}))
    # Without a trainer clients have the whole replica. Without a replica another rule fires.
    assert not told(trainer=None)
    assert not told(trainer=TrainerHealth(step=1, version="run:1:ab", last_seen_s=LOST_S + 1))
    assert not told(replicas=())
    assert not told(finished=True)


def test_the_worst_reason_is_the_verdict() -> None:
    fired = [Verdict.BROKER_MEMORY, Verdict.STALLED, Verdict.REPLICAS_BEHIND, Verdict.DEAD_LETTERS]
    verdict, reasons = judge(SNAPSHOT)
    assert verdict is Verdict.BROKER_MEMORY
    assert [reason.verdict for reason in reasons] == [*fired, Verdict.TRAINER_STARVED]
    assert judge(replace(SNAPSHOT, maxmemory=0)).verdict is Verdict.STALLED
    assert judge(replace(SNAPSHOT, maxmemory=0, jobs=NOTHING, client_jobs=MUCH)).verdict is Verdict.STALLED
    assert {rule.verdict for rule in RULES} == set(Verdict) - {Verdict.OK}


async def test_the_seqs_in_use_are_served_or_loading(rig: Rig) -> None:
    await _beat(rig, "a", seq=3, loading=f"{rig.run_id}:5:ab")
    await _beat(rig, "b", seq=4)
    await _age_replica(rig, "b", 60)
    registry = ReplicaRegistry(rig.broker)
    assert await registry.seqs_in_use() == {3, 4, 5}
    await _beat(rig, "a", seq=5)
    await registry.leave("b")
    assert await registry.seqs_in_use() == {5}


def test_a_beat_names_a_weight_version() -> None:
    with pytest.raises(ValueError, match="expected run_id:seq:digest"):
        ReplicaBeat("a", ReplicaState.SERVING, "latest", in_flight=0)


async def test_many_replicas_are_listed_up_to_a_bound(rig: Rig) -> None:
    registry = ReplicaRegistry(rig.broker)
    for number in range(600):
        await registry.beat(ReplicaBeat(f"r{number}", ReplicaState.SERVING, "run:0:ab", in_flight=0))
    assert len((await take_snapshot(rig.broker)).replicas) == 512


async def test_the_sweep_forgets_the_long_lost_only(rig: Rig) -> None:
    await _beat(rig, "gone")
    await _beat(rig, "here")
    await _age_replica(rig, "gone", 7200)
    assert await sweep_broker(rig.broker, forget_after_s=3600) == 1
    assert [replica.id for replica in (await _health(rig)).replicas] == ["here"]
    assert await rig.broker.redis.exists(rig.broker.keys.replica("gone")) == 0


@pytest.mark.parametrize("clients", [False, True])
async def test_the_sweep_keeps_consumers_that_own_jobs(rig: Rig, clients: bool) -> None:
    await rig.submit(1)
    await rig.submission.submit_client(make_job(rig.run_id, sink=Sink.CLIENT), limit=9)
    owner, idle = (rig.replica(name, clients=clients, lease_ms=SHORT_LEASE_MS) for name in ("owner", "idle"))
    await owner.claim(1, BLOCK_MS)
    await idle.claim(1, 1)
    await sweep_broker(rig.broker, forget_after_s=0)
    consumers = await rig.broker.redis.xinfo_consumers(owner.stream, "replicas")
    assert {item["name"].decode() for item in consumers} == {owner.consumer}
    assert len(await rig.expired(idle)) == 1
