"""Memory that the broker holds for HTTP clients: results, dead letters, and reservations for unfinished jobs."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple

from .broker import Broker

SCAN_COUNT = 1_000
TOTAL, LETTER, SESSION = ":total", ":dead:", ":session:"
"""Row name of the sum, and name prefixes of dead letters and sessions; none is a job id."""


class Held(StrEnum):
    IN_WORK = "in work"
    """Queued or running: the size is the most that the job may take."""
    DONE = "done"
    DEAD = "dead letter"
    SESSION = "session"


class ClientJob(NamedTuple):
    name: str
    """Id of the job, the dead letter or the session."""
    held: Held
    num_bytes: int
    expires_s: float | None
    """Seconds until a result or an unused session expires; None for others."""
    caller: str
    """Owner of the job; "" if it was submitted without a caller name."""


async def client_jobs(broker: Broker) -> list[ClientJob]:
    """All of them, in no particular order."""
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
        if name.startswith(SESSION) and name in ends:
            name, left_s = name.removeprefix(SESSION), max(0.0, ends[name] - now)
            jobs.append(ClientJob(name, Held.SESSION, int(size), left_s, caller))
        elif name in ends:
            jobs.append(ClientJob(name, Held.DONE, int(size), max(0.0, ends[name] - now), caller))
        elif name.startswith(LETTER):
            jobs.append(ClientJob(name.removeprefix(LETTER), Held.DEAD, int(size), None, caller))
    return jobs


async def _rows(broker: Broker, key: str) -> dict[str, str]:
    """Rows of a hash without its total, read in pages: a row that changes meanwhile is returned once, old or new."""
    rows: dict[str, str] = {}
    cursor: int | None = None
    page: Any
    while cursor != 0:
        async with broker.call():
            cursor, page = await broker.redis.hscan(key, cursor or 0, count=SCAN_COUNT)
        rows |= {name.decode(): value.decode() for name, value in page.items()}
    rows.pop(TOTAL, None)
    return rows
