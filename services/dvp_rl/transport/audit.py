"""Audit log of a run: changes made by people, and weights published by trainers."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple

from .broker import Broker


class Change(NamedTuple):
    at: float
    """Unix seconds of the broker's clock."""
    by: str
    did: str
    what: str


async def changes(broker: Broker, count: int) -> list[Change]:
    """The `count` newest changes, newest first. The broker keeps the last AUDIT_LENGTH changes by people, also through
    a purge, and about as many announcements by trainers."""
    async with broker.call(), broker.redis.pipeline(transaction=False) as both:
        both.xrevrange(broker.keys.audit, count=count)
        both.xrevrange(broker.keys.versions, count=count)
        by_people, versions = await both.execute()
    found = [_change(entry_id, **_text(fields, "by", "did", "what")) for entry_id, fields in by_people]
    for entry_id, fields in versions:
        text = _text(fields, "by", "version")
        found.append(_change(entry_id, text["by"], "published", text["version"]))
    return sorted(found, key=attrgetter("at"), reverse=True)[:count]


def _change(entry_id: bytes, by: str, did: str, what: str) -> Change:
    return Change(int(entry_id.partition(b"-")[0]) / 1000, by, did, what)


def _text(fields: dict[bytes, bytes], *names: str) -> dict[str, Any]:
    """The named fields as text; "" for a field that an older version did not write."""
    return {name: fields.get(name.encode(), b"").decode(errors="replace") for name in names}
