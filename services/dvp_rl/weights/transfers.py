"""Requests of replicas to be sent a weight version, and the trainer's answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import cast

from dvp_rl.contract.errors import UnavailableError, WeightError
from dvp_rl.contract.transfer import Offer, TransferAnswer, TransferRequest
from dvp_rl.transport.broker import Broker

BLOCK_S = 2.0
KEEP_S = 60
"""TTL of unclaimed messages, in seconds."""


class Transfers:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def ask(self, request: TransferRequest, timeout_s: float) -> Offer:
        """Requests a version and returns the trainer's offer. Raises WeightError if the trainer refuses,
        UnavailableError if none answers in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._push(self._broker.keys.transfers, request.to_bytes())
                while (data := await self._pop(self._broker.keys.transfer(request.id))) is None:
                    pass  # _pop waits
        except TimeoutError:
            raise UnavailableError(f"no trainer offered {request.version} within {timeout_s:g} s") from None
        finally:
            await self._forget(request)
        answer = TransferAnswer.from_bytes(data)
        if answer.offer is None:
            raise WeightError(f"the trainer does not send {request.version}: {answer.error}")
        return answer.offer

    async def next(self) -> TransferRequest | None:
        """The oldest request; None if none arrives within BLOCK_S. Raises RequestError, UnavailableError."""
        data = await self._pop(self._broker.keys.transfers)
        return None if data is None else TransferRequest.from_bytes(data)

    async def answer(self, request: TransferRequest, answer: TransferAnswer) -> None:
        await self._push(self._broker.keys.transfer(request.id), answer.to_bytes())

    async def _push(self, key: str, data: bytes) -> None:
        async with self._broker.call(), self._broker.redis.pipeline(transaction=True) as pipeline:
            pipeline.rpush(key, data)
            pipeline.expire(key, KEEP_S)
            await pipeline.execute()

    async def _pop(self, key: str) -> bytes | None:
        async with self._broker.call():
            found = await cast(Awaitable[list[bytes] | None], self._broker.redis.blpop([key], timeout=BLOCK_S))
        return None if found is None else found[1]

    async def _forget(self, request: TransferRequest) -> None:
        """Withdraws the request, so that no trainer sends what nobody waits for."""
        async with self._broker.call():
            await self._broker.redis.lrem(self._broker.keys.transfers, 0, request.to_bytes())  # type: ignore[arg-type]
