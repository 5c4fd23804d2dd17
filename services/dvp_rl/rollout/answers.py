"""Answers that may be large: made while they are sent, a few thousand tokens at a time, and only so many at once."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from dvp_rl.contract.errors import OverloadedError
from dvp_rl.contract.shares import EVERYBODY, fits

logger = logging.getLogger(__name__)

JSON = "application/json"
SMALL_BYTES = 256 * 1024
WAIT_S = 10.0
"""For other answers to end."""
RETRY_AFTER_S = 5.0
SEND_TIMEOUT_S = 600.0


class Room:
    """Bytes of results, as the broker holds them, that may be read and sent at the same time. The caller whose turn was
    longest ago comes first, and of its results the first. Small ones pass, and whoever waits for their own to be read
    holds up nobody."""

    def __init__(self, num_bytes: int) -> None:
        self._size = self._free = num_bytes
        self._of_callers: Counter[str] = Counter()
        self._line: dict[asyncio.Future[None], tuple[int, str]] = {}
        self._served: dict[str, int] = {}
        """When each caller was last served, as numbers that grow."""

    @asynccontextmanager
    async def hold(self, num_bytes: int, caller: str = EVERYBODY) -> AsyncIterator[None]:
        """What is larger than the room has it alone, but that of a caller with a name counts for half of it at most.
        Raises OverloadedError after WAIT_S."""
        most = self._size if caller == EVERYBODY else self._size // 2
        held = 0 if num_bytes <= SMALL_BYTES else min(num_bytes, most)
        if held:
            await self._wait(held, caller)
        try:
            yield
        finally:
            self._take(-held, caller)
            self._serve()

    async def _wait(self, num_bytes: int, caller: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._line[turn] = num_bytes, caller
        self._serve()
        try:
            async with asyncio.timeout(WAIT_S):
                await turn
        except BaseException as error:
            if self._line.pop(turn, None) is None:  # its turn came at the same moment
                self._take(-num_bytes, caller)
            self._serve()
            if not isinstance(error, TimeoutError):
                raise
            reason = f"other results of {(self._size - self._free) / 2**20:.1f} MiB are being read"
            raise OverloadedError(reason, RETRY_AFTER_S) from None

    def _serve(self) -> None:
        for turn, (num_bytes, caller) in sorted(self._line.items(), key=lambda item: self._served.get(item[1][1], 0)):
            own = self._of_callers[caller]
            if turn.done() or (caller != EVERYBODY and own and not fits(caller, own, num_bytes, self._free)):
                continue
            if num_bytes > self._free:
                break
            del self._line[turn]
            self._served[caller] = max(self._served.values(), default=0) + 1
            self._take(num_bytes, caller)
            turn.set_result(None)

    def _take(self, num_bytes: int, caller: str) -> None:
        self._free -= num_bytes
        self._of_callers[caller] += num_bytes


async def in_pieces(body: BaseModel, name: str, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """`body` as JSON, with `pieces` as the value of the field `name`, which comes last. One call into pydantic cannot
    be interrupted: for megabytes of numbers the event loop would stand still."""
    yield body.model_dump_json(exclude={name}).encode().removesuffix(b"}") + f',"{name}":'.encode()
    async for piece in pieces:
        yield piece
    yield b"}"


async def null() -> AsyncIterator[bytes]:
    yield b"null"


class Streamed(Response):
    """JSON that comes in pieces, from a context that is left when the last one was sent, or the client is gone, or too
    slow. What goes wrong before there are SMALL_BYTES is answered as an error."""

    def __init__(self, pieces: AbstractAsyncContextManager[AsyncIterator[bytes]]) -> None:
        super().__init__()
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._pieces as pieces:
            answer = await _answer(pieces)
            try:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await answer(scope, receive, send)
            except TimeoutError:
                logger.warning("gave up on a client that did not read its answer within %g s", SEND_TIMEOUT_S)


async def _answer(pieces: AsyncIterator[bytes]) -> Response:
    begin = b""
    async for piece in pieces:
        begin += piece
        if len(begin) > SMALL_BYTES:
            return StreamingResponse(_joined(begin, pieces), media_type=JSON)
    return Response(begin, media_type=JSON)


async def _joined(begin: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield begin
    async for piece in rest:
        yield piece
