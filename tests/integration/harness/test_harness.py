"""A harness plays episodes of a real queue through real replicas, in environments in worker processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from signal import SIGTERM
from typing import Any

import pytest

from dvp_rl.cancellation import CANCEL_AGAIN_S, cancel
from dvp_rl.client import calls
from dvp_rl.contract.errors import ConfigError, UnavailableError
from dvp_rl.contract.group import DeadLetter, FinishReason, Group, Sample
from dvp_rl.contract.job import Job, Sink
from dvp_rl.harness import harness as harness_module
from dvp_rl.harness import replicas
from dvp_rl.harness.harness import Harness
from dvp_rl.harness.process import EnvironmentProcess
from dvp_rl.harness.settings import HarnessSettings
from dvp_rl.rollout import sessions
from dvp_rl.transport.broker import Broker
from dvp_rl.workers.limits import Limits
from tests.integration.transport.rig import BLOCK_MS, Rig
from tests.kit.forked import HARNESS, service
from tests.kit.ports import free_port
from tests.kit.replicas import ReplicaThread
from tests.kit.scripted import scripted
from tests.kit.tokens import TOKEN
from tests.kit.wait import WITHIN_S, until, until_async

MODULE = "tests.integration.harness.environments"
OFTEN_S = 0.1


@pytest.fixture
async def rig(broker: Broker) -> Rig:
    return await Rig.of(broker)


@pytest.fixture
def args(model: Path, broker_url: str, run_id: str) -> list[str]:
    return ["--model", str(model), "--redis-url", broker_url, "--run-id", run_id, "--engine", "fake"]


def settings(*urls: str, environment: str = "Sums", **options: Any) -> HarnessSettings:
    flags = {"environment": f"{MODULE}:{environment}", "urls": ",".join(urls), "workers": 2} | options
    return HarnessSettings.load([f"--{name.replace('_', '-')}={value}" for name, value in flags.items()])


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Harnesses look at their episodes often."""
    monkeypatch.setattr(harness_module, "beat_every", lambda idle_s: OFTEN_S)


@asynccontextmanager
async def playing(*urls: str, **options: Any) -> AsyncIterator[Harness]:
    harness = Harness(settings(*urls, **options), token=options.get("token", ""))
    task = asyncio.create_task(harness.run())
    try:
        yield harness
        assert not task.done(), await task
    finally:
        await cancel([task])


async def receive(rig: Rig) -> Group | DeadLetter:
    (delivery,) = await until_async(lambda: rig.groups.read(9, BLOCK_MS))
    return delivery.item


def num_turns(samples: Sequence[Sample]) -> int:
    """Turns of an episode: what the environment said in between separates those of one branch."""
    return sum(len(sample.environment) + 1 for sample in samples)


async def drawing(replica: ReplicaThread) -> None:
    """Waits until the replica draws a turn."""
    await asyncio.to_thread(until, lambda: replica.in_flight() == 1)


async def played(rig: Rig, job: Job, field: str) -> bytes | None:
    """A field of the session in which the job's first episode is played."""
    redis, keys = rig.broker.redis, rig.broker.keys
    session_id = await redis.hget(keys.job(job.job_id), "session:0")
    return None if session_id is None else await redis.hget(keys.session(session_id.decode()), field)


async def has_a_heartbeat(rig: Rig, job: Job) -> None:
    """Lets the job's first episode be nearly forgotten, and waits until it is not."""
    redis, keys = rig.broker.redis, rig.broker.keys
    session = keys.session((await redis.hget(keys.job(job.job_id), "session:0")).decode())
    left_ms = 1000 * WITHIN_S
    await redis.pexpire(session, round(left_ms))

    async def is_kept() -> bool:
        return await redis.pttl(session) > left_ms

    await until_async(is_kept)


async def test_episodes_go_from_the_trainer_to_the_trainer(args: list[str], tmp_path: Path, rig: Rig) -> None:
    job = await rig.submit_episodes(n=3, task={"prompt": "1+1="})
    with ReplicaThread(tmp_path, *args) as replica:
        async with playing(replica.url) as harness:
            group = await receive(rig)
            assert isinstance(group, Group)
            await until_async(lambda: harness.summary() == "episodes: 3 finished; mean reward 1.000")
    assert (group.job_id, group.rewards) == (job.job_id, (1.0, 1.0, 1.0))
    assert [num_turns(samples) for samples in group.episodes] == [2, 2, 2]
    for samples, metrics in zip(group.episodes, group.metrics, strict=True):
        assert metrics == {"turns": 2, "forks": len(samples) - 1, "drifted": metrics["drifted"], "second": 1}
        assert metrics["drifted"] <= metrics["forks"]


async def test_an_environment_may_leave_the_reward_to_the_trainer(args: list[str], tmp_path: Path, rig: Rig) -> None:
    await rig.submit_episodes(n=2)
    with ReplicaThread(tmp_path, *args) as replica:
        async with playing(replica.url, environment="Plain"):
            group = await receive(rig)
    assert isinstance(group, Group)
    assert group.rewards == (None, None)


@pytest.mark.parametrize(
    ("agent", "reward", "metrics"), [("Asking", 0.5, {"asked": 2}), ("Half", 0.25, {}), ("CutOff", 0.5, {})]
)
async def test_an_agent_asks_the_model_itself(
    args: list[str], tmp_path: Path, rig: Rig, agent: str, reward: float, metrics: dict[str, float]
) -> None:
    await rig.submit_episodes(n=2)
    with ReplicaThread(tmp_path, *args, "--token", TOKEN, token=TOKEN) as replica:
        async with playing(replica.url, environment=agent, token=TOKEN) as harness:
            group = await receive(rig)
            how = "cut off" if agent == "CutOff" else "finished"
            await until_async(lambda: harness.summary() == f"episodes: 2 {how}; mean reward {reward:.3f}")
    assert isinstance(group, Group)
    assert [num_turns(samples) for samples in group.episodes] == [2, 2]
    assert group.rewards == (reward, reward)
    for counted in group.metrics:
        assert counted["turns"] == 2
        assert {name: value for name, value in counted.items() if name == "asked"} == metrics


@pytest.mark.parametrize(
    ("agent", "error"),
    [("Failing", "play: ValueError: no more sums"), ("Mute", "has no turn to be finished")],
)
async def test_an_agent_that_fails_costs_its_episode(
    args: list[str], tmp_path: Path, rig: Rig, agent: str, error: str
) -> None:
    await rig.submit_episodes(n=1)
    with ReplicaThread(tmp_path, *args, "--max-deliveries=1") as replica:
        async with playing(replica.url, environment=agent):
            letter = await receive(rig)
    assert isinstance(letter, DeadLetter)
    assert error in letter.error


async def test_an_agent_is_kept_while_it_is_busy(args: list[str], tmp_path: Path, rig: Rig, often: None) -> None:
    job = await rig.submit_episodes(n=1)
    with ReplicaThread(tmp_path, *args) as replica:
        async with playing(replica.url, environment="Sleeping", timeout_s=600):
            await until_async(lambda: played(rig, job, "turns"))
            await has_a_heartbeat(rig, job)


async def test_too_many_turns_cut_an_episode_off(args: list[str], tmp_path: Path, rig: Rig) -> None:
    await rig.submit_episodes(n=1, sampling={"max_tokens": 4})
    with ReplicaThread(tmp_path, *args) as replica:
        async with playing(replica.url, environment="Endless", max_turns=3):
            group = await receive(rig)
    assert isinstance(group, Group)
    assert group.rewards == (0.75,)
    (*_, last) = group.samples
    assert last.finish_reason is FinishReason.LENGTH
    assert num_turns(group.samples) == 3


async def test_a_full_context_cuts_an_episode_off(args: list[str], tmp_path: Path, rig: Rig) -> None:
    await rig.submit_episodes(n=1, sampling={"max_tokens": 64})
    with ReplicaThread(tmp_path, *args, "--fake.num-tokens=64") as replica:
        async with playing(replica.url, environment="Endless", max_turns=1000) as harness:
            group = await receive(rig)
            await until_async(lambda: harness.summary().startswith("episodes: 1 cut off"))
    assert isinstance(group, Group)
    (*_, last) = group.samples
    assert last.finish_reason is FinishReason.LENGTH
    assert last.num_model_tokens + sum(span.end - span.start for span in last.environment) <= 256


async def test_an_episode_that_cannot_be_played_says_why_and_spares_the_others(
    args: list[str], tmp_path: Path, rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    broken = await rig.submit_episodes(0, n=2, task={"prompt": "die"})
    good = await rig.submit_episodes(1, n=2, task={"prompt": "good"})
    with ReplicaThread(tmp_path, *args, "--max-deliveries=2") as replica:
        async with playing(replica.url, environment="Moody"):
            found = {item.job_id: item for item in [await receive(rig), await receive(rig)]}
    letter, group = found[broken.job_id], found[good.job_id]
    assert isinstance(letter, DeadLetter)
    assert letter.error in [f"episode {index}: step: its process ended with exit status 3" for index in (0, 1)]
    assert isinstance(group, Group)
    assert group.rewards == (1.0, 1.0)
    assert "cannot be played: step: its process ended with exit status 3" in caplog.text


TOO_MANY = "at most 16 items after validation, not more, got dict of 20"


@pytest.mark.parametrize(
    ("mood", "error"),
    [
        ("much", "episode 0: sums of all steps: reward: Input should be a finite number, got inf"),
        ("names", f"episode 0: sums of all steps: metrics: Dictionary should have {TOO_MANY}"),
        ("surrogate", r"episode 0: step: ValueError: not \ud800 text"),
    ],
)
async def test_no_episode_ends_the_harness(args: list[str], tmp_path: Path, rig: Rig, mood: str, error: str) -> None:
    await rig.submit_episodes(0, n=1, task={"prompt": mood})
    await rig.submit_episodes(1, n=1, task={"prompt": "good"})
    with ReplicaThread(tmp_path, *args, "--max-deliveries=1") as replica:
        async with playing(replica.url, environment="Moody", max_turns=2, workers=1):
            letter, group = await receive(rig), await receive(rig)
    assert isinstance(letter, DeadLetter)
    assert letter.error == error
    assert isinstance(group, Group)


async def test_messages_that_no_turn_can_have_are_the_environments_fault(
    args: list[str], tmp_path: Path, rig: Rig
) -> None:
    await rig.submit_episodes(n=1, task={"prompt": "good"})
    with ReplicaThread(tmp_path, *args, "--max-deliveries=1") as replica:
        async with playing(replica.url, environment="Silent"):
            letter = await receive(rig)
    assert isinstance(letter, DeadLetter)
    assert "messages: List should have at least 1 item" in letter.error


async def test_the_next_replica_takes_over(args: list[str], tmp_path: Path, rig: Rig) -> None:
    await rig.submit_episodes(n=8)
    dead = f"http://127.0.0.1:{free_port()}"
    with ReplicaThread(tmp_path, *args) as replica:
        async with playing(dead, replica.url, dead):
            group = await receive(rig)
    assert isinstance(group, Group)
    assert len(group.episodes) == 8


async def test_an_episode_stays_with_the_replica_that_answered(args: list[str], tmp_path: Path, rig: Rig) -> None:
    await rig.submit_episodes(n=2)
    with scripted() as (failing, seen), ReplicaThread(tmp_path, *args) as replica:
        async with playing(failing, replica.url, workers=1):
            await receive(rig)
    assert seen, "it was asked for an episode"
    assert [request.body for request in seen] == [{"wait_s": harness_module.WAIT_S}] * len(seen)


async def test_a_call_says_how_often_it_was_sent_before() -> None:
    """A gateway in front of the replicas then chooses another one."""
    gone, failed = (503, {}, {}), (500, {}, {})
    with scripted(gone, failed, (204, {}, None)) as (url, seen):
        async with replicas.Replicas([url], token="", patience_s=WITHIN_S) as served:
            answer, _ = await served.send(calls.take_episode(0.0), 0)
    assert answer.root is None
    counts = [request.headers.get("X-Stainless-Retry-Count") for request in seen]
    assert counts == [None, "1", "2"]


async def test_an_environment_may_take_longer_than_an_episode_may_be_idle(
    args: list[str], tmp_path: Path, rig: Rig, often: None
) -> None:
    job = await rig.submit_episodes(n=1, task={"prompt": "wait"})
    with ReplicaThread(tmp_path, *args) as replica:
        async with playing(replica.url, environment="Moody", timeout_s=600):
            await until_async(lambda: played(rig, job, "turns"))
            await has_a_heartbeat(rig, job)


async def test_a_replica_may_draw_for_longer_than_an_episode_may_be_idle(
    args: list[str], tmp_path: Path, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "beat_every", lambda idle_s: OFTEN_S)
    job = await rig.submit_episodes(n=1)
    with ReplicaThread(tmp_path, *args, "--fake.service-time-s=600") as replica:
        async with playing(replica.url):
            await drawing(replica)
            await has_a_heartbeat(rig, job)


async def test_a_harness_leaves_an_episode_that_is_not_its_own_any_more(
    args: list[str], tmp_path: Path, rig: Rig, often: None
) -> None:
    job = await rig.submit_episodes(n=1, task={"prompt": "wait"})
    with ReplicaThread(tmp_path, *args) as replica:
        async with playing(replica.url, environment="Moody", timeout_s=600) as harness:
            await until_async(lambda: played(rig, job, "turns"))
            await rig.broker.redis.delete(rig.broker.keys.job(job.job_id))
            await until_async(lambda: harness.summary() == "episodes: 1 lost")


async def test_a_start_that_is_cancelled_leaves_no_answer() -> None:
    """As when an episode is lost while its environment's process is replaced."""
    environment = EnvironmentProcess(f"{MODULE}:Plain", Limits(600, 2048))
    starting = asyncio.create_task(environment.start())
    await until_async(lambda: environment._process.is_alive())
    await cancel([starting])
    try:
        await environment.close()
        for _ in range(2):
            assert await environment.reset({}) == ([{"role": "user", "content": "1+1="}], [])
            await environment.close()
    finally:
        await environment.stop()


async def test_a_cancellation_waits_until_the_process_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks are cancelled again after a while: a killed process may need longer on a busy machine."""
    environment = EnvironmentProcess(f"{MODULE}:Plain", Limits(600, 2048))
    stop = environment._process.stop

    async def slowly() -> None:
        await asyncio.sleep(2 * CANCEL_AGAIN_S)
        await stop()

    monkeypatch.setattr(environment._process, "stop", slowly)
    starting = asyncio.create_task(environment.start())
    await until_async(lambda: environment._process.is_alive())
    await cancel([starting])
    assert not environment._process.is_alive()


async def test_while_a_replica_should_draw_a_harness_only_looks(
    args: list[str], tmp_path: Path, rig: Rig, often: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeats would keep the episode with a replica that hangs."""
    job = await rig.submit_episodes(n=1)
    with ReplicaThread(tmp_path, *args, "--fake.service-time-s=600") as replica:
        async with playing(replica.url) as harness:
            await drawing(replica)
            monkeypatch.setattr(calls, "beat_session", None)
            await rig.broker.redis.delete(rig.broker.keys.job(job.job_id))
            await until_async(lambda: harness.summary() == "episodes: 1 lost")


async def test_replicas_may_start_after_the_harness(
    args: list[str], tmp_path: Path, rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "TELL_AFTER_S", 0.0)
    await rig.submit_episodes(n=1)
    port = free_port()
    async with playing(f"http://127.0.0.1:{port}"):
        await until_async(lambda: "trying again for at most 600 s" in caplog.text)
        with ReplicaThread(tmp_path, *args, "--port", str(port)):
            assert isinstance(await receive(rig), Group)


async def test_a_harness_without_replicas_ends_after_a_while() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(UnavailableError, match=url):
        await Harness(settings(url, patience_s=0.3), token="").run()


async def test_only_a_harness_may_play(args: list[str], tmp_path: Path, rig: Rig) -> None:
    with ReplicaThread(tmp_path, *args, "--token", TOKEN, token=TOKEN) as replica:
        with pytest.raises(ConfigError, match="token"):
            await Harness(settings(replica.url), token="").run()
        await rig.submit_episodes(n=1)
        async with playing(replica.url, token=TOKEN):
            assert isinstance(await receive(rig), Group)


async def test_no_environment_ends_the_harness(args: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no function 'Absent'"):
        await Harness(settings("http://127.0.0.1:1", environment="Absent"), token="").run()


async def test_evaluations_are_played_too(args: list[str], tmp_path: Path, rig: Rig) -> None:
    await rig.submit_episodes(n=1, sink=Sink.EVAL)
    with ReplicaThread(tmp_path, *args) as replica:
        async with playing(replica.url):
            await until_async(lambda: rig.length(rig.broker.keys.evals))


async def test_the_program_gives_back_what_it_plays_when_it_is_stopped(
    args: list[str], tmp_path: Path, rig: Rig
) -> None:
    await rig.submit_episodes(n=1)
    log = tmp_path / "harness.log"
    with ReplicaThread(tmp_path, *args, "--fake.service-time-s=600") as replica:
        flags = [f"--environment={MODULE}:Sums", f"--urls={replica.url}", "--workers=1"]
        with service(HARNESS, flags, log) as program:
            await drawing(replica)
            program.send_signal(SIGTERM)
            assert await asyncio.to_thread(program.wait) == 0, log.read_text()
        assert "stopped; episodes: none" in log.read_text()
        with replica.client() as client:
            episodes = (await asyncio.to_thread(client.queue)).episodes
    assert (episodes.backlog, episodes.pending, episodes.redelivered) == (1, 0, 0)
