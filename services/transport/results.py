"""What the broker holds for HTTP clients: results until they expire, and room for those of jobs that are in work."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from .broker import Broker

SCAN_COUNT = 1_000


class ClientJob(NamedTuple):
    job_id: str
    num_bytes: int
    """What its result takes or, while it is in work, may come to."""
    expires_s: float | None
    """Seconds until the result is forgotten; None while the job is in work."""


async def client_jobs(broker: Broker) -> AsyncIterator[ClientJob]:
    """All, in no order; one that changes meanwhile may come twice, or as it was."""
    redis, keys = broker.redis, broker.keys
    cursor: int | None = None
    page: Any
    while cursor != 0:
        async with broker.call():
            seconds, microseconds = await redis.time()
            cursor, page = await redis.hscan(keys.client_bytes, cursor or 0, count=SCAN_COUNT)
            ends = await redis.zmscore(keys.client_expiry, list(page)) if page else []
        now = seconds + microseconds / 1e6
        for (job_id, size), end in zip(page.items(), ends, strict=True):
            yield ClientJob(job_id.decode(), int(size), None if end is None else max(0.0, end / 1000 - now))
