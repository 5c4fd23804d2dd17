"""The weight registry: which version to serve."""

from __future__ import annotations

from collections.abc import Iterable

from services.contract.weights import Announcement

from .broker import Broker


class WeightRegistry:
    def __init__(self, broker: Broker) -> None:
        raise NotImplementedError

    async def next_seq(self, *, fence: int, at_least: int = 0) -> int:
        """Allocates a sequence number, larger than any before and than `at_least` (the checkpoint's, in case the broker
        was wiped)."""
        raise NotImplementedError

    async def announce(self, announcement: Announcement, *, fence: int) -> None:
        """Raises WeightError if its seq is not above the last announced one, LeaseLostError."""
        raise NotImplementedError

    async def latest(self) -> Announcement | None:
        raise NotImplementedError

    async def wait_newer(self, seq: int, block_ms: int) -> Announcement | None:
        """The newest announcement as soon as it is above `seq`; None after `block_ms`."""
        raise NotImplementedError

    async def history(self) -> dict[int, Announcement]:
        """The recent announcements by seq."""
        raise NotImplementedError

    async def pin(self, seqs: Iterable[int], *, fence: int) -> None:
        """Replaces the seqs that checkpoints need."""
        raise NotImplementedError

    async def pinned(self) -> frozenset[int]:
        raise NotImplementedError
