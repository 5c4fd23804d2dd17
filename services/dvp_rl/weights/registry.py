"""The weight registry: which version to serve."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from dvp_rl.contract.errors import WeightError
from dvp_rl.contract.weights import Announcement
from dvp_rl.transport.broker import MAX_BLOCK_MS, Broker

HISTORY = 256


class WeightRegistry:
    def __init__(self, broker: Broker) -> None:
        self.broker = broker

    async def next_seq(self, *, fence: int, at_least: int = 0) -> int:
        """Allocates a sequence number greater than all earlier ones and than `at_least` (the checkpoint's, in case the
        broker was wiped)."""
        return int(await self.broker.script("next_seq", fence, at_least))

    async def announce(self, announcement: Announcement, *, fence: int) -> None:
        """Announces a version. Raises WeightError if its seq is not above the last announced one, LeaseLostError."""
        reply = await self.broker.script(
            "announce", fence, announcement.seq, announcement.version, announcement.min_seq, announcement.to_bytes()
        )
        if reply != b"ok":
            raise WeightError(
                f"version {announcement.version} is not newer than {reply.decode()}, which is already announced: "
                f"its seq must come from next_seq"
            )

    async def latest(self) -> Announcement | None:
        found = await self._newest(1)
        return found[0][1] if found else None

    async def _newest(self, count: int) -> list[tuple[str, Announcement]]:
        """Up to `count` pairs of entry id and announcement, newest first."""
        async with self.broker.call():
            entries: Any = await self.broker.redis.xrevrange(self.broker.keys.versions, count=count)
        return [(entry_id.decode(), Announcement.from_bytes(fields[b"data"])) for entry_id, fields in entries]

    async def wait_newer(self, seq: int, block_ms: int) -> Announcement | None:
        """The newest announcement as soon as its seq is above `seq`; None after `block_ms`."""
        deadline = time.monotonic() + block_ms / 1000
        while True:
            found = await self._newest(1)
            if found and found[0][1].seq > seq:
                return found[0][1]
            left_ms = int((deadline - time.monotonic()) * 1000)
            if left_ms <= 0:
                return None
            async with self.broker.call():
                last = found[0][0] if found else "0-0"
                await self.broker.redis.xread(
                    {self.broker.keys.versions: last}, count=1, block=min(left_ms, MAX_BLOCK_MS)
                )

    async def history(self) -> dict[int, Announcement]:
        """The last HISTORY announcements by seq."""
        return {announcement.seq: announcement for _, announcement in await self._newest(HISTORY)}

    async def pin(self, seqs: Iterable[int], *, fence: int) -> None:
        """Replaces the set of seqs that checkpoints need."""
        await self.broker.script("pin", fence, *seqs)

    async def pinned(self) -> frozenset[int]:
        async with self.broker.call():
            members = await self.broker.redis.smembers(self.broker.keys.pinned)
        return frozenset(int(member) for member in members)
