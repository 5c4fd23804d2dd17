"""Large results are made in pieces, within a limit of bytes at a time, and do not wait for ever for slow readers."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from dvp_rl.contract.errors import OverloadedError
from dvp_rl.contract.group import Group
from dvp_rl.contract.http import JobStatus, Problem
from dvp_rl.contract.job import JobState, Sink
from dvp_rl.contract.sampling import Sampling
from dvp_rl.engines.fake import FakeEngine
from dvp_rl.engines.tokenizer import load_tokenizer
from dvp_rl.http import guard
from dvp_rl.rollout import answers, service
from dvp_rl.rollout.answers import Room
from dvp_rl.rollout.prompts import NO_TEXT, PIECE_TOKENS, Prompts
from dvp_rl.transport.broker import Broker
from tests.kit import web
from tests.kit.records import make_group, make_job, make_sample, make_turns
from tests.kit.replicas import ReplicaThread
from tests.kit.wait import WITHIN_S, until, until_async

NUM_SAMPLES, NUM_TOKENS = 100, 3_000
METADATA = {"samples": [], "text": '"samples":[', "null": None}
"""Metadata that looks like the JSON around the pieces."""


def _group(run_id: str, name: str, num_samples: int = NUM_SAMPLES) -> Group:
    job = make_job(run_id, sink=Sink.CLIENT).model_copy(update={"job_id": name, "metadata": METADATA})
    token_ids = np.arange(NUM_TOKENS) % 80 + 10
    sample = make_sample(token_ids.tolist(), np.linspace(-9, 0, NUM_TOKENS).tolist(), run_id=run_id)
    return make_group(job, samples=[sample] * num_samples).model_copy(update={"metadata": METADATA})


async def _store(broker: Broker, group: Group) -> None:
    await broker.redis.hset(broker.keys.job(group.job_id), mapping={"state": JobState.DONE, "sink": Sink.CLIENT})
    await broker.redis.set(broker.keys.result(group.job_id), group.to_bytes())


@pytest.fixture
async def broker(broker_url: str) -> AsyncIterator[Broker]:
    async with await Broker.connect(broker_url, f"answers-{secrets.token_hex(6)}") as broker:
        yield broker


@pytest.fixture
def strict(
    model: Path, broker: Broker, broker_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ReplicaThread]:
    """A replica with room for one large result; others are refused at once."""
    monkeypatch.setattr(service, "MAX_RESULTS_BYTES", 1)
    monkeypatch.setattr(answers, "WAIT_S", 0.0)
    args = ["--model", str(model), "--engine", "fake", "--redis-url", broker_url, "--run-id", broker.run_id]
    with ReplicaThread(tmp_path, *args) as replica:
        yield replica


def _ask(replica: ReplicaThread, name: str, header: bytes = b"") -> socket.socket:
    """Asks for the result and reads only the status line."""
    client = socket.create_connection(("127.0.0.1", replica.port), timeout=WITHIN_S)
    head = f"GET /v1/jobs/{name} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n".encode()
    client.sendall(head + header + b"\r\n")
    assert client.recv(15) == b"HTTP/1.1 200 OK"
    return client


async def test_a_large_result_arrives_whole(strict: ReplicaThread, broker: Broker) -> None:
    for name, metadata in ("with", METADATA), ("without", {**METADATA, NO_TEXT: True}):
        group = _group(broker.run_id, name).model_copy(update={"metadata": metadata})
        await _store(broker, group)
        answer = await asyncio.to_thread(web.get, f"{strict.url}/v1/jobs/{name}")
        assert answer.headers["content-type"] == "application/json"
        status = JobStatus.model_validate_json(answer.content)
        assert status.group is not None
        assert (status.status, status.error, status.group.metadata) == (JobState.DONE, None, METADATA)
        assert len(status.group.samples) == NUM_SAMPLES
        assert len(answer.content) > 10 * answers.SMALL_BYTES
        for sent, stored in zip(status.group.samples, group.samples, strict=True):
            assert np.array_equal(sent.token_ids, stored.token_ids)
            assert np.array_equal(sent.logprobs, stored.logprobs)
            assert (sent.text is None) is (name == "without")


async def test_only_a_plain_completion_is_cut_at_its_stop_string(model: Path) -> None:
    prompts, ids = Prompts(load_tokenizer(model), FakeEngine()), load_tokenizer(model).encode("1+2=3")
    sampling = Sampling(stop=("+",), max_tokens=9)
    turns = make_turns([(ids[:2], [-1.0] * 2), (ids[2:4], None), (ids[4:], [-1.0])])
    job = make_job("run", n=2).model_copy(update={"sampling": sampling})
    group = make_group(job, samples=[make_sample(ids[:2], [-1.0] * 2), turns])
    answer = json.loads(b"".join([piece async for piece in prompts.response(group)]))
    assert [sample["text"] for sample in answer["samples"]] == ["1", "1+2=3"]
    assert answer["samples"][1]["environment"] == [{"start": 2, "end": 4}]


async def test_no_piece_takes_the_event_loop_for_long(model: Path) -> None:
    """Each piece is bounded in size, and other tasks run before it is made."""
    prompts = Prompts(load_tokenizer(model), FakeEngine())
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    waiting = asyncio.create_task(others())
    sizes, turns_by_piece = [], []
    async for piece in prompts.response(_group("run", "a")):
        sizes.append(len(piece))
        turns_by_piece.append(turns)
    waiting.cancel()
    assert sum(sizes) > 8_000_000
    assert max(sizes) < 60 * (PIECE_TOKENS + NUM_TOKENS)
    assert len(sizes) > NUM_SAMPLES * NUM_TOKENS / (PIECE_TOKENS + NUM_TOKENS)
    assert len(set(turns_by_piece[1:-2])) == len(sizes) - 3


async def test_so_many_bytes_are_sent_at_a_time(strict: ReplicaThread, broker: Broker) -> None:
    for name in "ab":
        await _store(broker, _group(broker.run_id, name))
    await _store(broker, _group(broker.run_id, "small", num_samples=2))
    await _store(broker, _group(broker.run_id, "queued"))
    await broker.redis.hset(broker.keys.job("queued"), "state", JobState.QUEUED)

    def ask() -> None:
        with _ask(strict, "a") as slow:
            refused = web.get(f"{strict.url}/v1/jobs/b")
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "5"
            assert "results of" in Problem.model_validate_json(refused.content).detail
            assert web.get(f"{strict.url}/v1/jobs/small").status_code == 200
            assert web.get(f"{strict.url}/v1/jobs/queued").json()["status"] == "queued"
            assert web.get(f"{strict.url}/healthz").status_code == 200
            while slow.recv(1 << 20):
                pass
        until(lambda: web.get(f"{strict.url}/v1/jobs/b").status_code == 200)

    await asyncio.to_thread(ask)


async def test_who_goes_away_takes_no_room(strict: ReplicaThread, broker: Broker) -> None:
    await _store(broker, _group(broker.run_id, "a"))

    def ask() -> None:
        _ask(strict, "a").close()
        until(lambda: web.get(f"{strict.url}/v1/jobs/a").status_code == 200)

    await asyncio.to_thread(ask)


async def test_who_does_not_read_takes_room_for_a_while_only(
    strict: ReplicaThread, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _store(broker, _group(broker.run_id, "a"))
    await _store(broker, _group(broker.run_id, "b"))

    def ask() -> None:
        with _ask(strict, "a"):
            until(lambda: web.get(f"{strict.url}/v1/jobs/b").status_code == 200)

    monkeypatch.setattr(answers, "SEND_TIMEOUT_S", 1.0)
    await asyncio.to_thread(ask)


async def test_a_body_that_never_comes_breaks_the_answer_off_quietly(
    strict: ReplicaThread, broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The request announces a body, and gets its answer without sending it."""
    monkeypatch.setattr(guard, "BODY_TIMEOUT_S", 0.3)
    await _store(broker, _group(broker.run_id, "a"))

    def ask() -> None:
        with _ask(strict, "a", b"Content-Length: 5\r\n"):
            until(lambda: web.get(f"{strict.url}/v1/jobs/a").status_code == 200)

    await asyncio.to_thread(ask)
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_result_that_cannot_be_read_is_an_error(strict: ReplicaThread, broker: Broker) -> None:
    await _store(broker, _group(broker.run_id, "a"))
    await broker.redis.set(broker.keys.result("a"), b"damaged")
    answer = await asyncio.to_thread(web.get, f"{strict.url}/v1/jobs/a")
    assert answer.status_code == 422
    assert "not a msgpack record" in Problem.model_validate_json(answer.content).detail


async def test_who_comes_first_has_the_room_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "SMALL_BYTES", 1)
    room = Room(10)
    order: list[str] = []

    async def hold(name: str, num_bytes: int, until: asyncio.Event) -> None:
        async with room.hold(num_bytes):
            order.append(name)
            await until.wait()

    end = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for name, num_bytes in (("first", 6), ("larger than the room", 100), ("fits now", 4), ("small", 1)):
            group.create_task(hold(name, num_bytes, end))
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert order == ["first", "small"]
        end.set()
    assert order == ["first", "small", "larger than the room", "fits now"]
    monkeypatch.setattr(answers, "WAIT_S", 0.0)
    async with room.hold(7):
        with pytest.raises(OverloadedError, match=r"0\.0 MiB"):
            async with room.hold(4):
                raise AssertionError
        async with room.hold(3), room.hold(1):
            pass
    async with room.hold(10):
        pass


async def test_who_does_not_read_holds_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "SMALL_BYTES", 0)
    room = Room(10)
    order: list[str] = []
    ends = {name: asyncio.Event() for name in ("alice", "bob")}

    async def hold(caller: str, num_bytes: int) -> None:
        async with room.hold(num_bytes, caller):
            order.append(f"{caller} {num_bytes}")
            await ends[caller].wait()

    async with asyncio.TaskGroup() as group:
        for caller, num_bytes in (("bob", 2), ("alice", 3), ("alice", 2), ("bob", 1)):
            group.create_task(hold(caller, num_bytes))
        await until_async(lambda: len(order) == 3)
        # 2 more bytes of alice's would be more than they leave free.
        assert order == ["bob 2", "alice 3", "bob 1"]
        with monkeypatch.context() as patched:
            patched.setattr(answers, "WAIT_S", 0.0)
            with pytest.raises(OverloadedError, match="are being read"):
                await hold("alice", 2)
        ends["bob"].set()
        await until_async(lambda: order[3:] == ["alice 2"])
        ends["alice"].set()
    async with room.hold(10, "carol"):
        pass


async def test_one_who_gives_up_when_its_turn_comes_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "SMALL_BYTES", 0)
    room = Room(10)
    first = asyncio.Event()

    async def hold(until: asyncio.Event) -> None:
        async with room.hold(10, "alice"):
            await until.wait()

    async with asyncio.TaskGroup() as group:
        group.create_task(hold(first))
        await asyncio.sleep(0)
        waiting = group.create_task(hold(asyncio.Event()))
        await asyncio.sleep(0)
        first.set()
        await asyncio.sleep(0)
        waiting.cancel()
    assert waiting.cancelled()
    monkeypatch.setattr(answers, "WAIT_S", 0.0)
    async with room.hold(10, "bob"):
        pass


async def test_results_of_callers_are_read_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller that asks most often does not come first, and no caller has the whole room."""
    monkeypatch.setattr(answers, "SMALL_BYTES", 0)
    room = Room(10)
    order: list[str] = []
    ends = [asyncio.Event() for _ in range(6)]

    async def hold(number: int, caller: str) -> None:
        async with room.hold(100, caller):
            order.append(f"{caller} {number}")
            await ends[number].wait()

    async with asyncio.TaskGroup() as group:
        for number, caller in enumerate(["alice", "alice", "alice", "bob", "bob", "carol"]):
            group.create_task(hold(number, caller))
        await until_async(lambda: order == ["alice 0", "bob 3"])
        for number, following in ((0, "carol 5"), (3, "alice 1"), (5, "bob 4"), (1, "alice 2")):
            ends[number].set()
            await until_async(lambda following=following: order[-1] == following)
        for end in ends:
            end.set()
    assert len(order) == 6
