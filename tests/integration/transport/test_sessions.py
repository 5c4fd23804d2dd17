"""Sessions in a real broker."""

from __future__ import annotations

import pytest

from dvp_rl.contract.errors import NotFoundError, OverloadedError, RequestError
from dvp_rl.contract.group import EngineFacts, FinishReason, Sample, VersionSpan
from dvp_rl.contract.session import Session, SessionState, Turn, digest
from dvp_rl.transport import sessions
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.results import client_jobs
from dvp_rl.transport.runs import purge_run
from dvp_rl.transport.sessions import SessionStore
from tests.kit.wait import until_async


def turn(name: str, *, num_tokens: int = 2, parent: int | None = None) -> Turn:
    return Turn(
        turn_id=name,
        parent=parent,
        context_ids=[1],
        sample=Sample(
            token_ids=[2] * num_tokens,
            logprobs=[-1.0] * num_tokens,
            kept_mass=[1.0] * num_tokens,
            kept_count=[2] * num_tokens,
            finish_reason=FinishReason.STOP,
            versions=(VersionSpan(version="a:0:0", start=0, end=num_tokens),),
            seed=0,
        ),
        engine=EngineFacts(name="fake", version="1", dtype="float32"),
        replica_id="replica",
        num_chars=1,
        text_digest=digest("a"),
        answer_digest=digest("c"),
        at=0.0,
    )


@pytest.fixture
def store(broker: Broker) -> SessionStore:
    return SessionStore(broker)


def session(store: SessionStore, name: str = "one", **settings: object) -> Session:
    return Session(session_id=name, run_id=store.broker.run_id, **settings)  # type: ignore[arg-type]


async def append(store: SessionStore, turn: Turn) -> tuple[int, bool]:
    return await store.append(await store.read("one"), turn)


async def fill(store: SessionStore) -> None:
    for number in range(1_000):
        await append(store, turn(f"turn-{number}", num_tokens=4_096))


async def held(store: SessionStore) -> int:
    return sum(job.num_bytes for job in await client_jobs(store.broker))


async def test_a_turn_is_recorded_once_and_in_order(store: SessionStore) -> None:
    await store.open(session(store))
    turns = [turn("a"), turn("b", parent=0), turn("c", parent=1)]
    assert [await append(store, each) for each in turns] == [(0, True), (1, True), (2, True)]
    assert await append(store, turns[1]) == (1, False)
    recorded = await store.read("one")
    assert recorded.turns == turns
    assert recorded.session == session(store)
    assert (recorded.state, recorded.reward) == (SessionState.OPEN, None)


async def test_an_end_is_final(store: SessionStore) -> None:
    await store.open(session(store))
    with pytest.raises(RequestError, match="no turn"):
        await store.finish("one", 1.0)
    await append(store, turn("a"))
    for _ in range(2):
        await store.finish("one", 0.25)
    with pytest.raises(RequestError, match=r"was finished with reward 0\.25"):
        await store.finish("one", None)
    with pytest.raises(RequestError, match="takes no more turns"):
        await append(store, turn("b"))
    assert await append(store, turn("a")) == (0, False), "what was recorded before stays"
    assert (await store.read("one")).reward == 0.25
    assert await store.open(session(store)) is SessionState.FINISHED


async def test_what_is_gone_takes_nothing_and_leaves_nothing(store: SessionStore) -> None:
    await store.open(session(store))
    await append(store, turn("a"))
    assert await held(store) > 0
    assert await store.delete("one") is SessionState.OPEN
    assert await held(store) == 0
    for call in (
        store.read("one"),
        append(store, turn("b")),
        store.finish("one", 1.0),
        store.delete("one"),
        store.read("no id at all"),
        store.read(":total"),
    ):
        with pytest.raises(NotFoundError, match="never opened"):
            await call
    assert not [key async for key in store.broker.redis.scan_iter(store.broker.keys.turns("*"))]


async def test_a_turn_is_recorded_only_in_the_session_that_was_read(store: SessionStore) -> None:
    await store.open(session(store))
    await append(store, turn("a"))
    read = await store.read("one")
    await store.delete("one")
    await store.open(session(store))
    with pytest.raises(NotFoundError):
        await store.append(read, turn("b"))
    await append(store, turn("c"))
    anew = await store.read("one")
    broken = anew._replace(turns=[turn("a")])  # as after a broker that lost its last writes
    with pytest.raises(NotFoundError):
        await store.append(broken, turn("b", parent=0))
    assert (await store.read("one")).turns == [turn("c")]


async def test_a_turn_that_continues_itself_is_no_turn(store: SessionStore) -> None:
    await store.open(session(store))
    await store.broker.redis.rpush(store.broker.keys.turns("one"), turn("a", parent=0).to_bytes())
    with pytest.raises(RequestError, match="parent: 0, of turn 0"):
        await store.read("one")


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
    await append(store, turn("a"))
    with pytest.raises(RequestError, match="at most 4000 allowed: finish it"):
        await append(store, turn("b", num_tokens=200))
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
        await append(store, turn("a", num_tokens=4_096))


async def test_a_closed_queue_opens_no_session_and_a_purge_removes_them(store: SessionStore) -> None:
    await store.open(session(store))
    await append(store, turn("a"))
    await store.broker.script("close", "for a test", "a test")
    with pytest.raises(OverloadedError, match="drained"):
        await store.open(session(store, "other"))
    assert await append(store, turn("b")) == (1, True), "an episode that has begun goes on"
    await purge_run(store.broker, by="a test", force=True)
    with pytest.raises(NotFoundError):
        await store.read("one")
