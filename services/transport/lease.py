"""One trainer per run: a lease with a fencing token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from .broker import Broker


class TrainerLease:
    """The token only grows, also over a wiped broker. Scripts compare it with the newest one handed out, so a stopped
    trainer that wakes up late is refused; one that merely stalled, with nobody in its place, carries on."""

    token: int

    def __init__(self, broker: Broker, holder: str, *, ttl_s: float = 15.0) -> None:
        """`holder`: a word for people, e.g. the command line's config name; host and pid are added."""
        raise NotImplementedError

    async def acquire(self) -> int:
        """Returns the token. Raises ConfigError naming the present holder, its host, pid and since when."""
        raise NotImplementedError

    async def renew(self) -> None:
        """Raises LeaseLostError if another trainer took over."""
        raise NotImplementedError

    async def release(self) -> None:
        """Gives the lease up if it is still ours; never raises LeaseLostError."""
        raise NotImplementedError

    @asynccontextmanager
    async def held(self) -> AsyncIterator[int]:
        """Acquires, renews in the background every ttl / 3 and releases. When the lease is lost the body is cancelled
        and LeaseLostError leaves the block."""
        raise NotImplementedError
        yield 0
