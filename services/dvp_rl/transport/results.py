"""What the broker holds for HTTP clients: results, dead letters, and room for the results of jobs in work."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple

from .broker import Broker

SCAN_COUNT = 1_000
TOTAL, LETTER = ":total", ":dead:"
"""Names that are no job ids."""


class Held(StrEnum):
    IN_WORK = "in work"
    """Queued or running: the bytes that it may come to."""
    DONE = "done"
    DEAD = "dead letter"


class ClientJob(NamedTuple):
    name: str
    """The job's id, or that of the dead letter."""
    held: Held
    num_bytes: int
    expires_s: float | None
    """Seconds until a result is forgotten."""
    caller: str
    """Whose it is; empty if one without limits asked for it."""


async def client_jobs(broker: Broker) -> list[ClientJob]:
    """All, in no order."""
    keys = broker.keys
    reserved, held = await _rows(broker, keys.client_reserved), await _rows(broker, keys.client_held)
    callers = await _rows(broker, keys.client_callers)
    ends: dict[str, float] = {}
    names = list(held)
    for start in range(0, len(names), SCAN_COUNT):
        page = names[start : start + SCAN_COUNT]
        async with broker.call():
            found: Any = await broker.redis.zmscore(keys.client_expiry, page)
        ends |= {name: end / 1000 for name, end in zip(page, found, strict=True) if end is not None}
    async with broker.call():
        seconds, microseconds = await broker.redis.time()
    now = seconds + microseconds / 1e6
    jobs = [ClientJob(name, Held.IN_WORK, int(size), None, callers.get(name, "")) for name, size in reserved.items()]
    for name, size in held.items():
        caller = callers.get(name, "")
        if name in ends:
            jobs.append(ClientJob(name, Held.DONE, int(size), max(0.0, ends[name] - now), caller))
        elif name.startswith(LETTER):
            jobs.append(ClientJob(name.removeprefix(LETTER), Held.DEAD, int(size), None, caller))
    return jobs


async def _rows(broker: Broker, key: str) -> dict[str, str]:
    """Read a few at a time: one that changes meanwhile comes once, as it was or as it is."""
    rows: dict[str, str] = {}
    cursor: int | None = None
    page: Any
    while cursor != 0:
        async with broker.call():
            cursor, page = await broker.redis.hscan(key, cursor or 0, count=SCAN_COUNT)
        rows |= {name.decode(): value.decode() for name, value in page.items()}
    rows.pop(TOTAL, None)
    return rows
