"""Pending entries (read but not finished) and their holders."""

from __future__ import annotations

from collections.abc import Container
from enum import StrEnum
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from .broker import Broker
from .entries import checked

MOST_LOOKED_AT = 1000
"""Most entries that `who_holds` reads, oldest first."""
NAMED = 3


class Stream(StrEnum):
    JOBS = "jobs"
    CLIENT_JOBS = "client_jobs"
    GROUPS = "groups"
    EVALS = "evals"


class Pending(NamedTuple):
    entry_id: str
    job_id: str
    sink: str
    holder: str
    """Consumer: replica id and nonce of its process, or trainer and fencing token."""
    silent_s: float
    """Seconds since the holder took or renewed it."""
    age_s: float
    """Seconds since it was queued."""
    deliveries: int
    """Engine errors and unclean deaths so far."""


async def pending(broker: Broker, stream: Stream, count: int, *, after: str | None = None) -> list[Pending]:
    """A page of pending entries, oldest first. `after`: last entry id of the previous page."""
    start = "0-0" if after is None else checked(after)
    rows = await broker.script("pending", getattr(broker.keys, stream), start, count)
    return [
        Pending(entry.decode(), job.decode(), sink.decode(), holder.decode(), silent / 1000, age / 1000, deliveries)
        for entry, holder, silent, job, sink, deliveries, age in rows
    ]


async def who_holds(broker: Broker, job_ids: Container[str]) -> str:
    """Human-readable list of the replicas that hold `job_ids`, the longest silent first."""
    found = await pending(broker, Stream.JOBS, MOST_LOOKED_AT)
    held = sorted((entry for entry in found if entry.job_id in job_ids), key=attrgetter("holder"))
    groups = [list(entries) for _, entries in groupby(held, key=attrgetter("holder"))]
    groups.sort(key=lambda entries: -max(entry.silent_s for entry in entries))
    named = [_described(entries) for entries in groups[:NAMED]] + ["..."] * (len(groups) > NAMED)
    return "; ".join(named) or "no replica holds any of them"


def _described(entries: list[Pending]) -> str:
    replica_id, _, _ = entries[0].holder.rpartition("/")
    silent_s, age_s = (max(map(attrgetter(name), entries)) for name in ("silent_s", "age_s"))
    return f"replica {replica_id} holds {len(entries)}, silent for {silent_s:.0f} s, queued for up to {age_s:.0f} s"
