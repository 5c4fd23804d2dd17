"""Large answers: encoded while they are sent, a few thousand tokens at a time, within a limit on their total size."""

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
"""Longest wait for other answers to end, in seconds."""
RETRY_AFTER_S = 5.0
SEND_TIMEOUT_S = 600.0


class Room:
    """Limits the bytes of results, as stored in the broker, that are read and sent at the same time. The caller whose
    last turn was longest ago comes first, with its oldest request. Small results pass at once. A caller that waits for
    its own results to be read does not block others."""

    def __init__(self, num_bytes: int) -> None:
        self._size = self._free = num_bytes
        self._of_callers: Counter[str] = Counter()
        self._line: dict[asyncio.Future[None], tuple[int, str]] = {}
        self._served: dict[str, int] = {}
        """When each caller was last served, as an increasing number."""

    @asynccontextmanager
    async def hold(self, num_bytes: int, caller: str = EVERYBODY) -> AsyncIterator[None]:
        """Holds room for a result until the context ends. A result larger than the room takes all of it, but one of a
        named caller counts for at most half. Raises OverloadedError after WAIT_S."""
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
    """`body` as JSON, with `pieces` as the value of the field `name`, which comes last. A single call into pydantic
    would block the event loop while it encodes megabytes of numbers."""
    yield body.model_dump_json(exclude={name}).encode().removesuffix(b"}") + f',"{name}":'.encode()
    async for piece in pieces:
        yield piece
    yield b"}"


async def null() -> AsyncIterator[bytes]:
    yield b"null"


class Streamed(Response):
    """JSON sent in pieces. Their context is left when the last one was sent, or the client disconnected or was too
    slow. An error before SMALL_BYTES have been made becomes an error response."""

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
