"""The lease with a fencing token that admits one trainer per run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import socket
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

from dvp_rl.contract.errors import ConfigError, LeaseLostError, UnavailableError

from .broker import Broker

logger = logging.getLogger(__name__)

ACQUIRE_POLL_S = 1.0
FAREWELL_S = 5.0
"""Longest wait of an ending trainer for an unavailable broker, in seconds."""


class TrainerLease:
    """The trainer's lease. Its token only grows, even if the broker is wiped. Scripts compare it with the newest one
    issued, so a stopped trainer that wakes up late is refused; one that only stalled and was not replaced continues."""

    def __init__(self, broker: Broker, holder: str, *, ttl_s: float = 15.0, above: int = 0) -> None:
        """`holder`: a name to show people, e.g. the name of the config file; host and pid are added. `above`: a token
        issued before, in case the broker has forgotten it and its clock was set back."""
        self.broker = broker
        self.token = 0
        self.ttl_s = ttl_s
        self._above = above
        self._nonce = secrets.token_hex(8)
        self._who = (holder, socket.gethostname(), os.getpid())
        self._lost: LeaseLostError | None = None
        self._leaving = False

    @property
    def _ttl_ms(self) -> int:
        return int(self.ttl_s * 1000)

    async def acquire(self) -> int:
        """Acquires the lease and returns the token. Waits for a crashed trainer's lease to expire, at most its TTL.

        Raises ConfigError with the holder, its host, pid and start time, as soon as the holder renews the lease.
        """
        left_ms = math.inf
        while isinstance(reply := await self._try_acquire(), list):
            *holder, expires_ms = reply
            if int(expires_ms) > left_ms:
                raise ConfigError(_refusal(self.broker, holder))
            left_ms = int(expires_ms)
            logger.info("waiting for the lease of a trainer that may have crashed: at most %.1f s", left_ms / 1000)
            await asyncio.sleep(min(ACQUIRE_POLL_S, self.ttl_s / 10))
        self.token = int(reply)
        return self.token

    async def _try_acquire(self) -> Any:
        return await self.broker.script("lease_acquire", self._nonce, self._ttl_ms, self._above, *self._who)

    async def renew(self) -> None:
        """Renews the lease. Raises LeaseLostError if another trainer took over."""
        await self.broker.script("lease_renew", self.token, self._ttl_ms, self._nonce, *self._who)

    async def release(self) -> None:
        """Releases the lease if it is still ours; never raises LeaseLostError."""
        await self.broker.script("lease_release", self.token)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[int]:
        """Acquires the lease, renews it in the background every ttl / 3, and releases it. If the lease is lost, the
        body is cancelled and the block raises LeaseLostError, also if the body failed with another error first: a
        replaced trainer finds its folders gone, and that error would mislead."""
        token = await self.acquire()
        body = asyncio.current_task()
        assert body is not None, "needs a running task"
        keeper = asyncio.create_task(self._keep(body))
        try:
            yield token
        except Exception:
            await _briefly(self.renew())
            raise
        finally:
            self._leaving = True  # from here on a refused renewal does not cancel the body
            if self._lost is not None:
                await _take_cancellation(body)
            keeper.cancel()
            await asyncio.wait([keeper])
            if self._lost is not None:
                raise self._lost from None
            await _briefly(self.release())

    async def _keep(self, body: asyncio.Task[object]) -> None:
        while True:
            await asyncio.sleep(self.ttl_s / 3)
            try:
                await self.renew()
            except UnavailableError as error:
                # The lease is not lost until the broker says so: the token rejects late writes.
                logger.warning("cannot renew the trainer's lease: %s", error)
            except LeaseLostError as error:
                logger.error("%s", error)
                self._lost = error
                if not self._leaving:
                    body.cancel()
                return


async def check_untrained(broker: Broker) -> None:
    """Raises ConfigError if a trainer holds the run's lease and renews it, as `acquire` would. Waits for a crashed
    trainer's lease to expire, and changes nothing."""
    lease, left_ms = broker.keys.lease, math.inf
    while True:
        async with broker.call():
            fields = await broker.redis.hmget(lease, ["holder", "host", "pid", "since"])
            expires_ms = await broker.redis.pttl(lease)
        holder = [field for field in fields if isinstance(field, bytes)]
        if not holder or expires_ms < 0:
            return
        if expires_ms > left_ms:
            raise ConfigError(_refusal(broker, holder))
        left_ms = expires_ms
        await asyncio.sleep(min(ACQUIRE_POLL_S, left_ms / 1000))


def _refusal(broker: Broker, found: Sequence[bytes]) -> str:
    holder, host, pid, since = (part.decode() for part in found)
    when = datetime.fromtimestamp(int(since) / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return (
        f"run_id {broker.run_id!r} is being trained by {holder} (host {host}, pid {pid}, since {when}). "
        "Stop it, or choose another run_id"
    )


async def _briefly(farewell: Coroutine[Any, Any, None]) -> None:
    with contextlib.suppress(UnavailableError, TimeoutError):
        async with asyncio.timeout(FAREWELL_S):
            await farewell


async def _take_cancellation(task: asyncio.Task[object]) -> None:
    """Consumes the pending cancellation of a body that has already ended with an error of its own, so that it does not
    hit code outside the block."""
    while task.cancelling():
        task.uncancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0)
