"""A TCP proxy between this process and the broker that simulates network failures."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from enum import StrEnum
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit


class Network(StrEnum):
    FINE = "fine"
    CUT = "cut"
    """Existing and new connections are closed at once."""
    SILENT = "silent"
    """Connections stay open but nothing gets through, as with a lost route."""
    DEAF = "deaf"
    """Requests get through; replies do not."""


class Proxy:
    """`async with Proxy(url) as proxy: proxy.url`; `proxy.become(Network.CUT)`."""

    def __init__(self, url: str) -> None:
        self._parts = urlsplit(url)
        self._state = Network.FINE
        self._fine = asyncio.Event()
        self._fine.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.delay_s = 0.0
        """Delay of all traffic, in seconds."""

    @property
    def url(self) -> str:
        user, _, _ = self._parts.netloc.rpartition("@")
        return self._parts._replace(netloc=f"{user}@127.0.0.1:{self._server.sockets[0].getsockname()[1]}").geturl()

    def become(self, state: Network) -> None:
        """Changes the state. FINE after SILENT delivers held-back traffic; FINE after DEAF drops connections."""
        if Network.FINE in (state, self._state) and self._state in (Network.CUT, Network.DEAF):
            self._drop()
        self._state = state
        if state is Network.CUT:
            self._drop()
        if state is Network.SILENT:
            self._fine.clear()
        else:
            self._fine.set()

    def _drop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._state is Network.CUT:
            writer.close()
            return
        there_reader, there_writer = await asyncio.open_connection(self._parts.hostname, self._parts.port)
        pumps = [
            asyncio.create_task(self._pump(reader, there_writer, replies=False)),
            asyncio.create_task(self._pump(there_reader, writer, replies=True)),
        ]
        self._tasks.update(pumps)
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
            self._tasks.discard(pump)
        for end in (writer, there_writer):
            end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, replies: bool) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                await asyncio.sleep(self.delay_s)
                await self._fine.wait()
                if not (replies and self._state is Network.DEAF):
                    writer.write(data)
                    await writer.drain()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self._fine.set()
        self._drop()
        await asyncio.sleep(0)
