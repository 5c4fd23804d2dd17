"""The runs of one broker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path

import pytest

from dvp_rl.cancellation import cancel
from dvp_rl.contract.errors import NotFoundError, UnavailableError
from dvp_rl.monitor import runs as monitor_runs
from dvp_rl.monitor.bodies import RunStates
from dvp_rl.monitor.exporter import exposition
from dvp_rl.monitor.feed import STILL_HERE, Viewers
from dvp_rl.monitor.poller import Poller
from dvp_rl.monitor.runs import Runs, run_states
from dvp_rl.monitor.settings import MonitorSettings
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.lease import TrainerLease
from dvp_rl.transport.roles import Role, rules
from dvp_rl.transport.runs import latest_runs, purge_run
from dvp_rl.transport.submission import Submission
from tests.integration.monitor.process import Monitor, write_metrics
from tests.integration.transport.rig import Rig
from tests.kit.wait import WITHIN_S, until_async
from tests.kit.web import problem


@pytest.fixture
def broker_url(own_broker: EmbeddedBroker) -> str:
    """A broker without the runs of other tests: the list of runs has a limit."""
    return own_broker.url


async def test_other_runs_of_the_broker(staged: Rig, broker_url: str, tmp_path: Path) -> None:
    other = f"{staged.run_id}-2"
    (tmp_path / other).mkdir()
    write_metrics(tmp_path / other / "metrics.jsonl", 3)
    async with await Broker.connect(broker_url, other) as broker:
        rig = Rig(broker, await TrainerLease(broker, "test").acquire(), Submission(broker), staged.groups)
        await rig.submit(5)
        files = "--metrics-file", str(tmp_path / "{run}" / "metrics.jsonl")
        with Monitor(tmp_path, broker_url, staged.run_id, *files) as monitor:
            await asyncio.to_thread(_look_at_both, monitor, staged.run_id, other)


def _look_at_both(monitor: Monitor, own: str, other: str) -> None:
    monitor.until_ready()
    backlogs = [monitor.get(f"/v1/queue?run={run}").json()["jobs"]["backlog"] for run in (own, other)]
    assert backlogs == [4, 5]
    assert monitor.get(f"/v1/dead?run={other}").json()["letters"] == []
    with monitor.events(f"?run={other}") as events:
        found = {}
        while {"picture", "curves", "runs"} - found.keys():
            kind, content = next(events)
            found[kind] = content
    assert found["picture"]["run_id"] == other
    assert found["curves"]["panels"]
    states = {state.run_id: state for state in RunStates.model_validate(found["runs"]).runs}
    assert (states[own].step, states[own].dead, states[other].step) == (42, 3, None)
    refusal = problem(monitor.get(f"/v1/queue?run={own}-3"), 404).detail
    assert f"no such run; runs there: {own}" in refusal
    assert "run" in problem(monitor.get("/v1/queue?run=a%20b"), 422).detail


@asynccontextmanager
async def _running(runs: Runs) -> AsyncIterator[Runs]:
    polling = asyncio.create_task(runs.run())
    try:
        await until_async(lambda: runs.own.snapshot is not None)
        yield runs
    finally:
        await cancel([polling])


async def test_runs_are_polled_while_somebody_watches(
    staged: Rig, broker_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor_runs, "LOOK_EVERY_S", 0.01)
    own, *others = names = [staged.run_id, *(f"{staged.run_id}-{number}" for number in range(3))]
    for name in others:
        async with await Broker.connect(broker_url, name):
            pass
    argv = [f"--redis-url={broker_url}", f"--run-id={own}", "--interval-s=0.1", "--max-viewers=1"]
    async with _running(Runs(MonitorSettings.load(argv))) as runs:
        pollers = [await runs.of(name) for name in others]
        assert all(poller.snapshot is not None for poller in pollers), "each has looked before anybody gets it"
        assert set(runs.pollers) == {own, *names[2:]}, "of those that nobody watches, max_viewers + 1 are polled"
        assert [message async for message in pollers[0].feed.follow()] == [], "the stream of one who asked before ends"
        watched, unwatched = pollers[1:]
        watching = watched.feed.follow()
        await anext(watching)
        assert await runs.of(watched.run_id) is watched
        await runs.of(others[0])
        assert set(runs.pollers) == {own, others[0], watched.run_id}, "the watched one is kept, though used before"
        assert unwatched.feed.closed
        monkeypatch.setattr(monitor_runs, "UNWATCHED_S", 0.0)
        await until_async(lambda: set(runs.pollers) == {own, watched.run_id})
        before = watched.picture
        await until_async(lambda: watched.picture is not before)
        assert await runs.of(watched.run_id) is watched
        await watching.aclose()
        await until_async(lambda: set(runs.pollers) == {own})


async def test_the_stream_of_a_run_that_is_removed_ends(
    staged: Rig, broker_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor_runs, "LOOK_EVERY_S", 0.01)
    name = f"{staged.run_id}-2"
    async with (
        await Broker.connect(broker_url, name) as other,
        _running(Runs(MonitorSettings.load([f"--redis-url={broker_url}", f"--run-id={staged.run_id}"]))) as runs,
    ):
        poller = await runs.of(name)
        watching = poller.feed.follow()
        await anext(watching)
        await purge_run(other, by="test")
        async with asyncio.timeout(WITHIN_S):
            assert STILL_HERE not in [message async for message in watching]
        with pytest.raises(NotFoundError, match=f"'{name}': this broker knows no such run"):
            await runs.of(name)
        await other.ensure_groups()
        runs.close()
        with pytest.raises(UnavailableError, match="the monitor is stopping"):
            await runs.of(name)


async def test_a_long_list_has_the_own_run(own_broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_runs, "MAX_LISTED", 2)
    names = [f"run-{number}" for number in range(4)]
    now = int(1000 * time.time())
    for name, at in zip(names, (now, now - 1000, now - 90_000_000, now - 80_000_000), strict=True):
        async with await Broker.connect(own_broker.url, name) as broker:
            await broker.redis.hset(broker.keys.trainer, mapping={"at": at, "step": 1, "version": f"{name}:1:ab"})
    async with _running(Runs(MonitorSettings.load([f"--redis-url={own_broker.url}", "--run-id=another"]))) as runs:
        async with asyncio.timeout(WITHIN_S):
            async for message in runs.own.feed.follow():
                if message.startswith(b"event: runs"):
                    break
        states = RunStates.model_validate_json(message.partition(b"data: ")[2])
        assert ([state.run_id for state in states.runs], states.total) == (["run-0", "run-1", "another"], 5)
        assert await latest_runs(runs.own.broker) == ["run-0", "run-1", "run-3", "run-2"]


async def test_a_user_of_one_run_sees_no_other(own_broker: EmbeddedBroker) -> None:
    own = rules(Role.MONITOR, "one").split()
    async with await Broker.connect(own_broker.url, "one"), await Broker.connect(own_broker.url, "another") as broker:
        await broker.redis.execute_command("ACL", "SETUSER", "monitor-of-one", ">secret", *own)
    url = f"redis://monitor-of-one:secret@{own_broker.url.partition('@')[2]}"
    async with await Broker.connect(url, "one", role=Role.MONITOR, create=False) as broker:
        assert await latest_runs(broker) == ["one"]


DAMAGE = (b"", b"x", b"9" * 5000, b"-" + b"9" * 400, b"nan", b"inf", b"-1e999", b"\xff\xfe", b"1.5", b"a:b:c", b"[1]")


async def test_damaged_numbers_of_a_run_end_nothing(rig: Rig) -> None:
    broker, keys = rig.broker, rig.broker.keys
    now, version = int(1000 * time.time()), f"{rig.run_id}:3:ab"
    fields: dict[str, dict[str, object]] = {
        keys.trainer: {"at": now, "step": 3, "version": version, "waiting_s": 1.0, "scoring": 0, "finished": 0},
        keys.replica("a"): {"state": "serving", "version": version, "in_flight": 1, "since": now},
        keys.counters: {"committed_at": now, "redelivered": 1, "duplicates": 1, "submitted": 1},
    }
    poller = Poller(MonitorSettings.load([f"--run-id={rig.run_id}"]), rig.run_id, Viewers(1), broker)
    await broker.redis.zadd(keys.replicas, {"a": now})
    for key, good in fields.items():
        for field, value in product(good, DAMAGE):
            await broker.redis.hset(key, mapping=good | {field: value})
            await poller.look()
            assert (poller.snapshot is None) == (poller.picture.error != ""), (field, value)
            assert (
                f"\ndvp_queue_up {float(poller.snapshot is not None)}\n" in exposition(lambda: poller.snapshot).decode()
            )
            (state,) = await run_states(broker, [rig.run_id])
            assert state.error == poller.picture.error
            assert rig.run_id in await latest_runs(broker)
        await broker.redis.hset(key, mapping=good)
    for version in (b"x", b"r:" + b"9" * 4000 + b":ab"):
        await broker.redis.xadd(keys.versions, {"version": version, "min_seq": 0})
        await poller.look()
        assert "its data in the broker is damaged" in poller.picture.error
    await broker.redis.delete(keys.versions)
    await poller.look()
    assert poller.picture.error == ""
