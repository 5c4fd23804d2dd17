"""A TCP proxy in the test's event loop that simulates a faulty network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import NamedTuple

from dvp_rl.cancellation import cancel

PIECE = 4096
NEVER_S = 60.0


class Kind(StrEnum):
    CUT = "cut"
    STALL = "stall"
    """No more bytes arrive, and the connection stays open."""
    FLIP = "flip"
    """One byte is wrong."""


class Fault(NamedTuple):
    kind: Kind
    at: int
    """Bytes of the answer that arrive before the fault."""


class Proxy:
    """Forwards `url` to `port`. Connection k suffers `faults[k]`, later ones no fault."""

    def __init__(self, port: int, faults: Sequence[Fault]) -> None:
        self._port, self._faults = port, list(faults)
        self.passed = 0
        """Bytes of answers forwarded so far."""
        self.url = ""
        self._connections = set[asyncio.Task[None]]()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Proxy]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            await cancel(self._connections)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(asyncio.create_task(self._connection(reader, writer)))

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fault = self._faults.pop(0) if self._faults else None
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        asking = asyncio.create_task(_copy(reader, back))
        try:
            await self._answer(there, writer, fault)
        except ConnectionError:
            pass  # the other side has hung up
        finally:
            asking.cancel()
            await asyncio.wait([asking])
            back.close()
            writer.close()

    async def _answer(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, fault: Fault | None) -> None:
        seen = 0
        while data := await source.read(PIECE):
            if fault is not None and seen + len(data) > fault.at:
                whole = fault.at - seen
                if fault.kind is Kind.FLIP:
                    data = data[:whole] + bytes([data[whole] ^ 1]) + data[whole + 1 :]
                    fault = None
                else:
                    data = data[:whole]
            sink.write(data)
            await sink.drain()
            seen += len(data)
            self.passed += len(data)
            if fault is not None and seen == fault.at:
                await asyncio.sleep(NEVER_S if fault.kind is Kind.STALL else 0)
                return


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(PIECE):
        sink.write(data)
        await sink.drain()
