"""No connection stays open, at whatever point its owner is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from dvp_rl.cancellation import cancel, finished
from dvp_rl.client import AsyncClient
from dvp_rl.engines.server_client import IDLE_S
from dvp_rl.engines.sglang import SglangEngine
from dvp_rl.engines.sglang_client import SglangClient
from dvp_rl.engines.sglang_server import Remote
from tests.kit.models import make_model
from tests.kit.wait import WITHIN_S

NUM_IDLE, TURNS = 8, 24
"""Idle connections in a client's pool; cancellations are tried after 0 to TURNS - 1 turns of the event loop."""

ANSWER = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n{"job_id": "1"}'


class Server:
    """Answers everything with the same JSON object."""

    def __init__(self) -> None:
        self.url = ""
        self.connections: set[asyncio.StreamWriter] = set()
        self._empty = asyncio.Event()
        self._listening: asyncio.Server | None = None

    async def __aenter__(self) -> Server:
        # Room for all simultaneous connections: one that a full backlog turns away is retried only a second later.
        self._listening = await asyncio.start_server(self._answer, "127.0.0.1", 0, backlog=NUM_IDLE * TURNS)
        self.url = "http://{}:{}".format(*self._listening.sockets[0].getsockname())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listening is not None
        self._listening.close()
        for writer in self.connections:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.add(writer)
        self._empty.clear()
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(ANSWER)
        self.connections.remove(writer)
        if not self.connections:
            self._empty.set()
        writer.close()

    async def left(self) -> None:
        """Waits until every client has closed its connections."""
        async with asyncio.timeout(WITHIN_S):
            await self._empty.wait()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with Server() as listening:
        yield listening


def running() -> set[str]:
    return {task.get_coro().__qualname__ for task in asyncio.all_tasks()}  # type: ignore[union-attr]


async def cancel_after(turns: int, work: Coroutine[Any, Any, object]) -> None:
    task = asyncio.create_task(work)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])


async def test_a_cancelled_request_to_sglang_leaves_no_connection(server: Server) -> None:
    clients = [SglangClient(server.url) for _ in range(TURNS)]
    for client in clients:
        await asyncio.gather(*(client.generate({}) for _ in range(NUM_IDLE)))
    assert len(server.connections) == NUM_IDLE * TURNS
    await asyncio.sleep(IDLE_S)
    for turns, client in enumerate(clients):
        await cancel_after(turns, client.generate({}))
        await client.close()
    await server.left()


async def test_a_cancelled_call_of_the_client_leaves_no_connection(server: Server) -> None:
    for turns in range(TURNS):
        transport = httpx.AsyncHTTPTransport(limits=httpx.Limits(keepalive_expiry=0.0))
        async with AsyncClient(server.url, transport=transport) as client:
            await asyncio.gather(*(client.submit(prompt="1") for _ in range(NUM_IDLE)))
            await cancel_after(turns, client.submit(prompt="1"))
    await server.left()


@pytest.mark.parametrize("turns", range(1, 5))
async def test_a_cancelled_close_leaves_no_connection(server: Server, turns: int) -> None:
    client = SglangClient(server.url)
    await asyncio.gather(*(client.generate({}) for _ in range(NUM_IDLE)))
    await cancel_after(turns, client.close())
    await server.left()


async def test_a_closed_engine_leaves_neither_a_health_check_nor_its_connections(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dvp_rl.engines.served.HEALTH_EVERY_S", 0)
    model = make_model(tmp_path / "model")
    engines = [SglangEngine(model, Remote(server.url)) for _ in range(TURNS)]
    for engine in engines:
        await asyncio.gather(*(engine._client.generate({}) for _ in range(NUM_IDLE)))
    await asyncio.sleep(IDLE_S)
    for turns, engine in enumerate(engines):
        engine._supervisor = asyncio.create_task(engine._supervise())
        for _ in range(turns):
            await asyncio.sleep(0)
        await engine.close()
        assert {"SglangEngine._unresponsive", "SglangEngine._supervise"} & running() == set()
    await server.left()


@pytest.mark.parametrize("times", [0, 1, 5])
async def test_cancel_waits_for_the_end_of_a_task_that_takes_its_time(times: int) -> None:
    async def stubborn() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    cancelling = asyncio.create_task(cancel([task]))
    for _ in range(times):
        await asyncio.sleep(0)
        cancelling.cancel()
    await asyncio.wait([cancelling])
    assert task.done()
    assert cancelling.cancelled() is (times > 0)


async def test_work_ends_before_its_cancellation_is_raised() -> None:
    released, done = asyncio.Event(), False

    async def work() -> None:
        nonlocal done
        await released.wait()
        done = True

    waiting = asyncio.create_task(finished(work()))
    for _ in range(3):
        await asyncio.sleep(0)
        waiting.cancel()
    released.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert done


async def test_a_result_and_an_error_come_through() -> None:
    async def fail() -> None:
        raise ValueError("no")

    assert await finished(asyncio.sleep(0, "result")) == "result"
    with pytest.raises(ValueError, match="no"):
        await finished(fail())
