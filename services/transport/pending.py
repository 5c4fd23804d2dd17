"""Who holds what: entries that were read and not yet finished."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from services.contract.keys import REPLICAS, TRAINER

from .broker import Broker
from .entries import checked


class Stream(StrEnum):
    JOBS = "jobs"
    GROUPS = "groups"
    EVALS = "evals"


class Pending(NamedTuple):
    entry_id: str
    job_id: str
    sink: str
    holder: str
    """Replica or trainer, with the nonce of its process."""
    silent_s: float
    """Since the holder took or renewed it."""
    age_s: float
    """Since it was queued."""
    deliveries: int
    """Engine errors and unclean deaths so far."""


async def pending(broker: Broker, stream: Stream, count: int, *, after: str | None = None) -> list[Pending]:
    """Oldest first; `after`: the entry id that ended the page before."""
    start = "0-0" if after is None else checked(after)
    group = REPLICAS if stream is Stream.JOBS else TRAINER
    rows = await broker.script("pending", getattr(broker.keys, stream), group, start, count)
    return [
        Pending(entry.decode(), job.decode(), sink.decode(), holder.decode(), silent / 1000, age / 1000, deliveries)
        for entry, holder, silent, job, sink, deliveries, age in rows
    ]
