"""Sessions in a real broker."""

from __future__ import annotations

from typing import Any

import pytest

from dvp_rl.contract.errors import NotFoundError, OverloadedError, RequestError
from dvp_rl.contract.session import Ending, Session, SessionState, Turn, branches
from dvp_rl.transport import sessions
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.results import client_jobs
from dvp_rl.transport.runs import purge_run
from dvp_rl.transport.sessions import SessionStore
from tests.kit.records import make_turn
from tests.kit.wait import until_async


@pytest.fixture
def store(broker: Broker) -> SessionStore:
    return SessionStore(broker)


def session(store: SessionStore, name: str = "one", **settings: object) -> Session:
    return Session(session_id=name, run_id=store.broker.run_id, **settings)  # type: ignore[arg-type]


async def append(store: SessionStore, turn: Turn) -> tuple[int, bool]:
    return await store.append(await store.read("one"), turn)


async def finish(store: SessionStore, reward: float | None, **said: Any) -> bool:
    return await store.finish(await store.read("one"), Ending(reward=reward, **said))


async def fill(store: SessionStore) -> None:
    for number in range(1_000):
        await append(store, make_turn(f"turn-{number}", num_tokens=4_096))


async def held(store: SessionStore) -> int:
    return sum(job.num_bytes for job in await client_jobs(store.broker))


async def test_a_turn_is_recorded_once_and_in_order(store: SessionStore) -> None:
    await store.open(session(store))
    turns = [make_turn("a"), make_turn("b", parent=0), make_turn("c", parent=1)]
    assert [await append(store, each) for each in turns] == [(0, True), (1, True), (2, True)]
    assert await append(store, turns[1]) == (1, False)
    recorded = await store.read("one")
    assert recorded.turns == turns
    assert recorded.session == session(store)
    summary = await store.status("one")
    assert (summary.session, summary.state, summary.reward) == (session(store), SessionState.OPEN, None)
    assert (summary.turns, summary.branches, summary.tokens) == (3, 1, 9)


async def test_an_end_is_final(store: SessionStore) -> None:
    await store.open(session(store))
    with pytest.raises(RequestError, match="no turn"):
        await finish(store, 1.0)
    await append(store, make_turn("a"))
    for metrics in ({"a": 1, "b": 0.5}, {"b": 0.5, "a": 1}):
        assert await finish(store, 0.25, metrics=metrics)
    with pytest.raises(RequestError, match=r'was finished with reward 0\.25, metrics {"a": 1, "b": 0\.5}'):
        await finish(store, None)
    for other in ({}, {"a": 1}):
        with pytest.raises(RequestError, match=r"was finished with reward 0\.25"):
            await finish(store, 0.25, metrics=other)
    with pytest.raises(RequestError, match="takes no more turns"):
        await append(store, make_turn("b"))
    assert await append(store, make_turn("a")) == (0, False), "what was recorded before stays"
    summary = await store.status("one")
    assert (summary.reward, summary.metrics) == (0.25, {"a": 1, "b": 0.5})
    assert await store.open(session(store)) is SessionState.FINISHED


async def test_what_is_gone_takes_nothing_and_leaves_nothing(store: SessionStore) -> None:
    await store.open(session(store))
    await append(store, make_turn("a"))
    assert await held(store) > 0
    read = await store.read("one")
    assert await store.delete("one") is SessionState.OPEN
    assert await held(store) == 0
    for call in (
        store.read("one"),
        store.status("one"),
        append(store, make_turn("b")),
        store.finish(read, Ending(1.0)),
        store.delete("one"),
        store.read("no id at all"),
        store.read(":total"),
    ):
        with pytest.raises(NotFoundError, match="never opened"):
            await call
    assert not [key async for key in store.broker.redis.scan_iter(store.broker.keys.turns("*"))]


async def test_an_end_misses_no_turn(store: SessionStore) -> None:
    await store.open(session(store))
    await append(store, make_turn("a"))
    read = await store.read("one")
    await append(store, make_turn("b", parent=0))
    assert not await store.finish(read, Ending(1.0))
    assert (await store.status("one")).state is SessionState.OPEN
    assert await finish(store, 1.0)


async def test_branches_are_counted_as_they_come(store: SessionStore) -> None:
    await store.open(session(store))
    for name, parent in (("a", None), ("b", 0), ("c", 0), ("d", 1), ("e", None)):
        await append(store, make_turn(name, parent=parent))
        recorded = await store.read("one")
        assert (await store.status("one")).branches == len(branches(recorded.turns))
    assert (await store.status("one")).branches == 3


async def test_a_turn_is_recorded_only_in_the_session_that_was_read(store: SessionStore) -> None:
    await store.open(session(store))
    await append(store, make_turn("a"))
    read = await store.read("one")
    await store.delete("one")
    await store.open(session(store))
    with pytest.raises(NotFoundError):
        await store.append(read, make_turn("b"))
    await append(store, make_turn("c"))
    anew = await store.read("one")
    broken = anew._replace(turns=[make_turn("a")])  # as after a broker that lost its last writes
    with pytest.raises(NotFoundError):
        await store.append(broken, make_turn("b", parent=0))
    assert (await store.read("one")).turns == [make_turn("c")]


async def test_a_turn_that_continues_itself_is_no_turn(store: SessionStore) -> None:
    await store.open(session(store))
    await store.broker.redis.rpush(store.broker.keys.turns("one"), make_turn("a", parent=0).to_bytes())
    with pytest.raises(RequestError, match="parent: 0, of turn 0"):
        await store.read("one")


async def test_a_heartbeat_means_the_session_that_was_read(store: SessionStore) -> None:
    await store.open(session(store))
    read = await store.read("one")
    await store.delete("one")
    await store.open(session(store))
    with pytest.raises(NotFoundError):
        await store.beat("one", nonce=read.nonce)
    await store.beat("one", nonce=(await store.read("one")).nonce)
    await store.beat("one")


async def test_a_heartbeat_keeps_a_session_with_its_memory(store: SessionStore) -> None:
    await store.open(session(store, idle_s=3_600))
    redis, keys = store.broker.redis, store.broker.keys
    (opened,) = await client_jobs(store.broker)
    await redis.pexpire(keys.session("one"), 600_000)
    for table, name in ((keys.client_expiry, ":session:one"), (keys.client_sessions, "one")):
        assert await redis.zadd(table, {name: 0}, xx=True, ch=True) == 1
    await store.beat("one")
    (kept,) = await client_jobs(store.broker)
    assert kept._replace(expires_s=None) == opened._replace(expires_s=None)
    assert (kept.expires_s or 0) > 600
    assert await redis.pttl(keys.session("one")) > 600_000
    assert await redis.zscore(keys.client_sessions, "one") > 0
    await store.delete("one")
    assert await client_jobs(store.broker) == []
    with pytest.raises(NotFoundError):
        await store.beat("one")
    assert await client_jobs(store.broker) == []


async def test_an_idle_session_expires_with_its_memory(store: SessionStore) -> None:
    await store.open(session(store, idle_s=0.05))

    async def is_gone() -> bool:
        try:
            await store.read("one")
        except NotFoundError:
            return True
        return False

    await until_async(is_gone)
    await store.open(session(store, "other"))  # whoever asks for memory clears the accounts first
    assert [job.name for job in await client_jobs(store.broker)] == ["other"]


async def test_a_session_has_a_size_limit(store: SessionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSION_BYTES", 4_000)
    await store.open(session(store))
    await append(store, make_turn("a"))
    with pytest.raises(RequestError, match="at most 4000 allowed: finish it"):
        await append(store, make_turn("b", num_tokens=200))
    assert len((await store.read("one")).turns) == 1


async def test_sessions_leave_the_trainer_its_memory(own_broker: EmbeddedBroker, run_id: str) -> None:
    async with await Broker.connect(own_broker.url, run_id) as broker:
        store = SessionStore(broker)
        await broker.redis.config_set("maxmemory", 16 * 2**20)
        await store.open(session(store))
        with pytest.raises(OverloadedError, match="maxmemory"):
            await fill(store)
        assert len((await store.read("one")).turns) > 9
        assert await held(store) <= 4 * 2**20
        await store.delete("one")
        await store.open(session(store))
        await append(store, make_turn("a", num_tokens=4_096))


async def test_a_closed_queue_opens_no_session_and_a_purge_removes_them(store: SessionStore) -> None:
    await store.open(session(store))
    await append(store, make_turn("a"))
    await store.broker.script("close", "for a test", "a test")
    with pytest.raises(OverloadedError, match="drained"):
        await store.open(session(store, "other"))
    assert await append(store, make_turn("b")) == (1, True), "an episode that has begun goes on"
    await purge_run(store.broker, by="a test", force=True)
    with pytest.raises(NotFoundError):
        await store.read("one")
