"""Episodes in a real broker: one harness plays each at a time, and a job ends with the last of its episodes."""

from __future__ import annotations

import asyncio

import pytest

from dvp_rl.contract.errors import NotFoundError, OverloadedError, RequestError
from dvp_rl.contract.group import DeadLetter, EngineFacts, FinishReason, Group
from dvp_rl.contract.job import Job, JobState, Sink
from dvp_rl.contract.session import Ending, Fork, Session, SessionState, group_of
from dvp_rl.transport import sessions
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.dead_letters import DeadLetters, Outcome, Prospect
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.groups import Delivery, GroupQueue
from dvp_rl.transport.health import who_plays
from dvp_rl.transport.lease import TrainerLease
from dvp_rl.transport.results import client_jobs
from dvp_rl.transport.submission import Submission, Submitted
from tests.integration.transport.rig import BLOCK_MS, MOST_DELIVERIES, NO_LIMIT, Harness, Rig
from tests.kit.records import make_episodes, make_group, make_job, make_turn
from tests.kit.wait import until_async

SHORT_S = 0.03


@pytest.fixture
def harness(rig: Rig) -> Harness:
    return Harness(rig.broker)


async def submit(rig: Rig, *jobs: Job, limit: int = NO_LIMIT) -> list[Submitted]:
    return await rig.submission.submit(jobs, fence=rig.fence, limit=limit)


async def group(rig: Rig, sink: Sink = Sink.TRAIN) -> Group:
    (delivery,) = await rig.groups.read(9, BLOCK_MS, sink)
    assert isinstance(delivery.item, Group)
    return delivery.item


async def letter(rig: Rig) -> DeadLetter:
    (delivery,) = await rig.groups.read(9, BLOCK_MS)
    assert isinstance(delivery.item, DeadLetter)
    return delivery.item


async def deliveries(rig: Rig, job: Job, index: int = 0) -> int:
    return int(await rig.broker.redis.hget(rig.broker.keys.job(job.job_id), f"deliveries:{index}") or 0)


async def keys(rig: Rig) -> set[str]:
    """What the broker holds for episodes."""
    prefix = rig.broker.keys.everything.removesuffix("*")
    names = [key.decode().removeprefix(prefix) async for key in rig.broker.redis.scan_iter(rig.broker.keys.everything)]
    return {name.partition(":")[0] for name in names} & {"episodes", "played", "session", "turns"}


@pytest.mark.parametrize("sink", [Sink.TRAIN, Sink.EVAL])
async def test_a_job_ends_with_the_last_of_its_episodes(rig: Rig, harness: Harness, sink: Sink) -> None:
    job = make_episodes(rig.run_id, n=3, sink=sink)
    assert await submit(rig, job) == [Submitted.NEW]
    assert await rig.in_flight() == ({job.job_id} if sink is Sink.TRAIN else set())
    taken = [await harness.taken() for _ in range(3)]
    assert await harness.take() is None
    assert [episode.index for episode in taken] == [0, 1, 2]
    assert all(episode.job == job for episode in taken)
    assert (await rig.submission.status(job.job_id)).state is JobState.RUNNING
    for episode in (taken[2], taken[0]):
        await harness.play(episode, reward=float(episode.index))
        assert await rig.groups.read(9, BLOCK_MS, sink) == []
    await harness.play(taken[1], reward=None)
    found = await group(rig, sink)
    assert (found.job_id, found.sink, found.rewards) == (job.job_id, sink, (0.0, None, 2.0))
    assert found.task_digest == job.task_digest
    assert [len(samples) for samples in found.episodes] == [1, 1, 1]
    assert [sample.token_ids.tolist() for sample in found.samples] == [[2, 2, 1, 2, 2]] * 3
    assert (await rig.submission.status(job.job_id)).state is JobState.DONE
    assert await submit(rig, job) == [Submitted.DONE]
    assert await rig.counter("committed") == 1


async def test_what_is_acknowledged_leaves_only_ended_sessions(rig: Rig, harness: Harness) -> None:
    job = await rig.submit_episodes()
    for _ in range(2):
        await harness.play(await harness.taken())
    found = await rig.groups.read(9, BLOCK_MS)
    assert await keys(rig) == {"played", "session"}
    await rig.groups.settle(trained=[job.job_id])
    await rig.groups.acknowledge(found)
    assert await keys(rig) == {"session"}
    ended = rig.broker.keys.session("session-1")
    assert 0 < await rig.broker.redis.ttl(ended) <= 3600
    assert {b"state", b"data", b"reward"} <= {*(names := await rig.broker.redis.hkeys(ended))}
    assert not [name for name in names if b":" in name], "what grows with turns is gone"
    assert await client_jobs(rig.broker) == [], "the trainer's episodes count for no client"


async def test_episodes_are_taken_in_the_order_of_the_data(rig: Rig, harness: Harness) -> None:
    await submit(rig, *(make_episodes(rig.run_id, position) for position in range(12)))
    taken = [await harness.taken() for _ in range(24)]
    assert [(episode.job.job_id, episode.index) for episode in taken] == [
        (make_episodes(rig.run_id, position).job_id, index) for position in range(12) for index in range(2)
    ]


async def test_no_two_harnesses_play_the_same_episode(rig: Rig) -> None:
    await submit(rig, *(make_episodes(rig.run_id, position, n=5) for position in range(4)))
    harnesses = [Harness(rig.broker, f"h{number}") for number in range(8)]
    taken = await asyncio.gather(*(harness.take() for harness in harnesses for _ in range(4)))
    found = [(episode.job.job_id, episode.index) for episode in taken if episode is not None]
    assert len(found) == len(set(found)) == 20


async def test_an_episode_left_alone_is_given_to_another(rig: Rig, harness: Harness) -> None:
    job = await rig.submit_episodes(n=1, idle_s=SHORT_S)
    first = await harness.taken()
    await harness.say(first)
    second = await harness.taken()
    assert (second.job, second.index) == (job, 0)
    for call in (harness.say(first, "late"), harness.finish(first)):
        with pytest.raises(NotFoundError):
            await call
    assert await deliveries(rig, job) == 1
    assert await rig.counter("redelivered_episodes") == 1
    await harness.play(second)
    assert (await group(rig)).samples[0].num_model_tokens == 4, "nothing of the first attempt is in it"


async def test_a_session_that_lost_its_episode_changes_nothing(rig: Rig, harness: Harness) -> None:
    """As when the run is purged while a harness plays."""
    job = await rig.submit_episodes(n=1)
    episode = await harness.taken()
    await harness.say(episode)
    recorded = await harness.store.read(episode.session_id)
    await rig.broker.redis.delete(rig.broker.keys.job(job.job_id))
    group = group_of(recorded.session, recorded.turns, Ending(), job.job_id)
    for call in (
        harness.store.append(recorded, make_turn("late", parent=0)),
        harness.store.finish(recorded, Ending(), group),
    ):
        with pytest.raises(NotFoundError):
            await call
    await harness.store.delete(episode.session_id, "no sandbox", most_deliveries=1)
    assert not await rig.broker.redis.exists(rig.broker.keys.job(job.job_id), rig.broker.keys.played(job.job_id))
    assert await rig.groups.read(9, BLOCK_MS) == []


async def test_each_turn_renews_an_episode(rig: Rig, harness: Harness) -> None:
    await rig.submit_episodes(n=1, idle_s=60)
    episode = await harness.taken()
    name = f"{episode.job.job_id}/0000"
    before = await rig.broker.redis.zscore(rig.broker.keys.episodes, name)
    await rig.broker.redis.zadd(rig.broker.keys.episodes, {name: before - 30_000})  # half of its time is over
    await harness.say(episode)
    assert await rig.broker.redis.zscore(rig.broker.keys.episodes, name) >= before


async def test_a_heartbeat_renews_an_episode_as_a_turn_does(rig: Rig, harness: Harness) -> None:
    job = await rig.submit_episodes(n=1, idle_s=3600)
    episode = await harness.taken()
    redis, keys, name = rig.broker.redis, rig.broker.keys, f"{job.job_id}/0000"
    before = await redis.zscore(keys.episodes, name)
    await redis.zadd(keys.episodes, {name: before - 3_000_000})
    await redis.pexpire(keys.session(episode.session_id), 600_000)
    await harness.store.beat(episode.session_id)
    assert await redis.zscore(keys.episodes, name) >= before
    assert await redis.pttl(keys.session(episode.session_id)) > 600_000
    await harness.play(episode)
    with pytest.raises(RequestError, match="is finished"):
        await harness.store.beat(episode.session_id)


async def test_a_heartbeat_keeps_no_episode_of_another_harness(rig: Rig, harness: Harness) -> None:
    await rig.submit_episodes(n=1, idle_s=3600)
    other = await Harness(rig.broker, "other").taken()
    with pytest.raises(NotFoundError):
        await harness.store.beat(other.session_id, caller="somebody")
    await harness.store.beat(other.session_id, caller="other")
    await rig.submit_episodes(1, n=1, idle_s=SHORT_S)
    first = await harness.taken()
    await harness.taken()
    with pytest.raises(NotFoundError):
        await harness.store.beat(first.session_id)


async def test_an_episode_is_dropped_only_if_it_is_still_silent(rig: Rig, harness: Harness) -> None:
    await rig.submit_episodes(n=2, idle_s=60)
    played, ended = [await harness.taken() for _ in range(2)]
    await harness.say(played)
    await harness.play(ended)
    for episode in (played, ended):
        with pytest.raises(RequestError, match="has had a turn or a heartbeat since, or is finished"):
            await harness.store.drop(episode.session_id, by="test", silent_s=30)
    await harness.finish(ended, 1.0)
    await rig.broker.redis.pexpire(rig.broker.keys.session(played.session_id), 29_000)
    await harness.store.drop(played.session_id, by="test", silent_s=30)
    assert (await harness.taken()).index == 0


@pytest.mark.parametrize("turns", [1, 2])
async def test_a_session_that_an_older_replica_did_not_store_is_stored_later(
    rig: Rig, harness: Harness, turns: int
) -> None:
    await rig.submit_episodes(n=1)
    episode = await harness.taken()
    await harness.say(episode, "a")
    await rig.broker.redis.hdel(rig.broker.keys.session(episode.session_id), "data")
    if turns == 2:
        await harness.say(episode, "b")
    await harness.finish(episode)
    assert (await harness.store.status(episode.session_id)).state is SessionState.FINISHED


async def test_only_the_first_turn_reads_the_job(rig: Rig, harness: Harness) -> None:
    job = await rig.submit_episodes(n=1)
    episode = await harness.taken()
    await harness.say(episode, "a")
    await rig.broker.redis.hset(rig.broker.keys.job(job.job_id), "data", "its task may be large")
    await harness.say(episode, "b")
    await harness.finish(episode)
    assert (await group(rig)).task_digest == job.task_digest


async def test_a_job_whose_episode_is_always_left_alone_dies(rig: Rig, harness: Harness) -> None:
    job = await rig.submit_episodes(idle_s=SHORT_S)
    played = await harness.taken()
    await harness.play(played)
    for _ in range(MOST_DELIVERIES):
        assert (await harness.taken()).index == 1
    other = await rig.submit_episodes(1, n=1, idle_s=60)
    assert (await harness.taken()).job == other

    async def read() -> list[Delivery]:
        assert await harness.take() is None
        return await rig.groups.read(9, BLOCK_MS)

    (delivery,) = await until_async(read)
    dead = delivery.item
    assert isinstance(dead, DeadLetter)
    assert (dead.job_id, dead.deliveries) == (job.job_id, MOST_DELIVERIES)
    assert "episode 1: nobody played on" in dead.error
    assert await rig.in_flight() == {other.job_id}
    assert not await rig.broker.redis.exists(rig.broker.keys.played(job.job_id))


async def test_an_episode_that_is_given_back_costs_nothing(rig: Rig, harness: Harness) -> None:
    job = await rig.submit_episodes(n=1)
    for _ in range(MOST_DELIVERIES + 2):
        episode = await harness.taken()
        assert await harness.store.delete(episode.session_id) is SessionState.OPEN
    assert await deliveries(rig, job) == 0
    await harness.play(await harness.taken())
    assert (await group(rig)).job_id == job.job_id


async def test_an_episode_that_fails_too_often_ends_its_job_with_the_reason(rig: Rig, harness: Harness) -> None:
    job = await rig.submit_episodes(n=2)
    other = await harness.taken()
    await harness.say(other)
    for _ in range(MOST_DELIVERIES):
        episode = await harness.taken()
        await harness.store.delete(episode.session_id, "no sandbox", most_deliveries=MOST_DELIVERIES)
    assert (await letter(rig)).error == "episode 1: no sandbox"
    with pytest.raises(NotFoundError):
        await harness.say(other, "after the end of its job")
    assert await harness.take() is None
    assert await keys(rig) == set()
    assert (await rig.submission.status(job.job_id)).state is JobState.DEAD


async def test_a_dead_job_is_played_anew_after_a_replay(rig: Rig, harness: Harness) -> None:
    job = await rig.submit_episodes(n=2, idle_s=60)
    await harness.play(await harness.taken(), reward=0.5)
    for _ in range(MOST_DELIVERIES):
        episode = await harness.taken()
        await harness.store.delete(episode.session_id, "no sandbox", most_deliveries=MOST_DELIVERIES)
    letters = DeadLetters(rig.broker, by="a test")
    (found,) = await letters.page()
    assert (found.job, found.prospect) == (job, Prospect.OPEN)
    assert await letters.replay([found]) == [Outcome.REPLAYED]
    taken = [await harness.taken() for _ in range(2)]
    assert [episode.index for episode in taken] == [0, 1]
    assert await deliveries(rig, job, 1) == 0
    for episode in taken:
        await harness.play(episode)
    assert (await group(rig)).rewards == (1.0, 1.0)


async def test_a_repeated_call_takes_the_same_episode(rig: Rig, harness: Harness) -> None:
    await rig.submit_episodes()
    first, again = await harness.take("one"), await harness.take("one")
    assert first is not None
    assert again is not None
    assert first == again
    with pytest.raises(RequestError, match="another one for each episode"):
        await Harness(rig.broker, "another").take("one")
    assert (await harness.taken()).index == 1
    await harness.play(first)
    with pytest.raises(RequestError, match="another one for each episode"):
        await harness.take("one")


async def test_the_end_of_an_episode_may_be_repeated(rig: Rig, harness: Harness) -> None:
    await rig.submit_episodes(n=1)
    episode = await harness.taken()
    with pytest.raises(RequestError, match="no turn"):
        await harness.finish(episode)
    await harness.play(episode)
    await harness.finish(episode)
    with pytest.raises(RequestError, match=r"was finished with reward 1\.0"):
        await harness.finish(episode, 0.5)
    with pytest.raises(RequestError, match="takes no more turns"):
        await harness.say(episode, "late")
    summary = await harness.store.status(episode.session_id)
    assert (summary.state, summary.reward, summary.turns) == (SessionState.FINISHED, 1.0, 2)
    assert await rig.counter("committed") == 1
    await harness.store.delete(episode.session_id)
    assert (await group(rig)).rewards == (1.0,), "what is finished stays the trainer's"


async def test_an_episode_that_was_cut_off_says_so(rig: Rig, harness: Harness) -> None:
    await rig.submit_episodes(n=2)
    for truncated in (False, True):
        episode = await harness.taken()
        await harness.say(episode)
        await harness.finish(episode, truncated=truncated)
    found = await group(rig)
    assert [sample.finish_reason for sample in found.samples] == [FinishReason.STOP, FinishReason.LENGTH]


async def test_an_episode_tells_what_was_counted(rig: Rig, harness: Harness) -> None:
    await rig.submit_episodes(n=2)
    first, second = await harness.taken(), await harness.taken()
    for turn in (make_turn("main"), make_turn("other", fork=Fork.REWRITTEN), make_turn("drift", fork=Fork.DRIFT)):
        await harness.store.append(await harness.store.read(first.session_id), turn)
    await harness.finish(first, metrics={"tool_errors": 2})
    await harness.say(second)
    await harness.finish(second)
    plain = {"turns": 1, "forks": 0, "drifted": 0}
    assert (await group(rig)).metrics == ({"turns": 3, "forks": 2, "drifted": 1, "tool_errors": 2}, plain)


def test_episodes_of_replicas_that_counted_nothing_yet() -> None:
    """An upgrade finds some in the broker."""
    old = make_group(make_job("run", n=1)).model_copy(update={"episode_sizes": (1,), "rewards": (1.0,)})
    new = old.model_copy(update={"metrics": ({"turns": 2.0},)})
    assert Group.joined([old, new]).metrics == ({}, {"turns": 2.0})


async def test_the_last_turn_is_in_the_last_sample(rig: Rig, harness: Harness) -> None:
    """Though a sub-agent's branch was opened in between."""
    await rig.submit_episodes(n=1)
    episode = await harness.taken()
    for turn in (make_turn("main"), make_turn("sub", context_ids=[9]), make_turn("end", parent=0, num_tokens=3)):
        recorded = await harness.store.read(episode.session_id)
        await harness.store.append(recorded, turn)
    await harness.finish(episode, truncated=True)
    found = await group(rig)
    assert [sample.continues(found.prompt_ids).tolist() for sample in found.samples] == [[9], [1]]
    assert [sample.finish_reason for sample in found.samples] == [FinishReason.STOP, FinishReason.LENGTH]
    assert found.samples[-1].num_in_last_turn == 3


async def test_episodes_keep_prompts_and_engines_of_their_own(rig: Rig, harness: Harness) -> None:
    await rig.submit_episodes(n=2)
    half = EngineFacts(name="fake", version="1", dtype="bfloat16")
    await harness.play(await harness.taken())
    await harness.play(await harness.taken(), context_ids=[7, 8], engine=half, at=1.0)
    found = await group(rig)
    assert [sample.continues(found.prompt_ids).tolist() for sample in found.samples] == [[1], [7, 8]]
    assert found.engine == half
    assert [engine.dtype for engine in found.engines] == ["float32"]


async def test_episodes_draw_from_streams_of_their_own(rig: Rig, harness: Harness) -> None:
    sampling = {"seed": 5}
    job = make_episodes(rig.run_id, n=64, sampling=sampling)
    seeds = {Session.of(job, index, f"s{index}").sampling.seed for index in range(64)}
    assert len(seeds | {5}) == 65
    assert seeds == {Session.of(job, index, f"t{index}").sampling.seed for index in range(64)}, "an attempt draws alike"


async def test_episodes_share_the_size_of_a_group(rig: Rig, harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSION_BYTES", 8_000)
    await rig.submit_episodes(n=2)
    episode = await harness.taken()
    await harness.say(episode)
    with pytest.raises(RequestError, match="at most 4000 allowed: finish it"):
        await harness.say(episode, "b", num_tokens=200)


async def test_a_trainer_that_takes_over_gets_the_episodes(rig: Rig, harness: Harness) -> None:
    job = await rig.submit_episodes(n=1)
    await harness.play(await harness.taken())
    assert len(await rig.groups.read(9, BLOCK_MS)) == 1
    await rig.broker.redis.delete(rig.broker.keys.lease)
    fence = await TrainerLease(rig.broker, "next").acquire()
    (again,) = await GroupQueue(rig.broker, fence=fence).read(9, BLOCK_MS)
    assert again.job_id == job.job_id


async def test_what_is_damaged_ends_its_job(rig: Rig, harness: Harness) -> None:
    job = await rig.submit_episodes(n=2)
    for _ in range(2):
        await harness.play(await harness.taken())
    await rig.broker.redis.hset(rig.broker.keys.played(job.job_id), "1", b"damaged")
    assert await rig.groups.read(9, BLOCK_MS) == []
    assert "not a group" in (await letter(rig)).error


async def test_it_is_said_who_plays(rig: Rig, harness: Harness) -> None:
    await rig.submit_episodes(n=3)
    await harness.taken()
    assert await who_plays(rig.broker) == (
        "2 episodes wait for a harness (POST /v1/episodes on any replica), and 1 are being played"
    )


async def test_a_wiped_broker_gives_them_out_again(own_broker: EmbeddedBroker, run_id: str) -> None:
    async with await Broker.connect(own_broker.url, run_id) as broker:
        fence = await TrainerLease(broker, "test").acquire()
        job, harness = make_episodes(run_id, n=1), Harness(broker)
        submission = Submission(broker)
        await submission.submit([job], fence=fence, limit=NO_LIMIT)
        lost = await harness.taken()
        await harness.say(lost)
        await broker.redis.flushall()
        assert await submission.submit([job], fence=fence, limit=NO_LIMIT) == [Submitted.NEW]
        with pytest.raises(NotFoundError):
            await harness.say(lost, "late")
        await harness.play(await harness.taken())
        await broker.ensure_groups()
        (delivery,) = await GroupQueue(broker, fence=fence).read(9, BLOCK_MS)
        assert delivery.job_id == job.job_id


async def test_no_episode_is_given_out_without_room_for_its_turns(own_broker: EmbeddedBroker, run_id: str) -> None:
    async with await Broker.connect(own_broker.url, run_id) as broker:
        fence = await TrainerLease(broker, "test").acquire()
        await Submission(broker).submit([make_episodes(run_id, n=2)], fence=fence, limit=NO_LIMIT)
        harness = Harness(broker)
        episode = await harness.taken()
        await broker.redis.set("filler", b"x" * 2**20)
        used = int((await broker.redis.info("memory"))["used_memory"])
        await broker.redis.config_set("maxmemory", int(used / 0.75))
        with pytest.raises(OverloadedError, match="70% full"):
            await harness.take()
        await harness.play(episode)
        await broker.redis.delete("filler")
        assert (await harness.taken()).index == 1


async def test_turns_of_episodes_leave_room_for_groups(own_broker: EmbeddedBroker, run_id: str) -> None:
    async with await Broker.connect(own_broker.url, run_id) as broker:
        fence = await TrainerLease(broker, "test").acquire()
        await Submission(broker).submit([make_episodes(run_id, n=1)], fence=fence, limit=NO_LIMIT)
        await broker.redis.config_set("maxmemory", 16 * 2**20)
        harness = Harness(broker)
        episode = await harness.taken()

        async def fill() -> None:
            for number in range(1_000):
                await harness.say(episode, f"turn-{number}", num_tokens=4_096)

        with pytest.raises(OverloadedError, match="85% full"):
            await fill()
        await harness.finish(episode)
        (delivery,) = await GroupQueue(broker, fence=fence).read(9, BLOCK_MS)
        assert isinstance(delivery.item, Group)
