"""Closing the queue so that it drains, and removing a run from the broker."""

from __future__ import annotations

from difflib import get_close_matches

from dvp_rl.contract.errors import NotFoundError

from .broker import Broker
from .replicas import BEAT_S, MISSED_BEATS

SCAN_COUNT = 1_000
MAX_NAMED = 10


async def close_queue(broker: Broker, why: str, *, by: str) -> None:
    """Stops admission until `open_queue`: the trainer's jobs are refused and submitted again later, clients get a 429.
    Queued jobs still run to completion."""
    await broker.script("close", why, by)


async def open_queue(broker: Broker, *, by: str) -> bool:
    """Resumes admission. Returns True if the queue was closed."""
    return bool(await broker.script("open", by))


async def purge_run(broker: Broker, *, by: str, force: bool = False) -> int:
    """Removes every key of the run except the audit, as if the broker had been wiped for it. Returns the number of
    removed keys of single jobs and replicas. Raises RequestError while a trainer or a replica works on the run, unless
    `force`."""
    await broker.script("purge", "any" if force else "idle", int(1000 * BEAT_S * MISSED_BEATS), by)
    removed, cursor = 0, None
    while cursor != 0:
        async with broker.call():
            cursor, keys = await broker.redis.scan(cursor or 0, broker.keys.everything, SCAN_COUNT)
            keys = [key for key in keys if key != broker.keys.audit.encode()]
            removed += await broker.redis.unlink(*keys) if keys else 0
    return removed


async def check_run(broker: Broker) -> None:
    """Raises NotFoundError, which names some existing runs, if the broker knows nothing of this run."""
    async with broker.call():
        if await broker.redis.exists(broker.keys.jobs, broker.keys.versions, broker.keys.dead, broker.keys.replicas):
            return
        _, found = await broker.redis.scan(0, "dvp:{*}:jobs", 100 * SCAN_COUNT)
    names = [key.decode().partition("{")[2].partition("}")[0] for key in found if isinstance(key, bytes)]
    near = get_close_matches(broker.run_id, names) or sorted(names)[:MAX_NAMED]
    known = f"; runs there: {', '.join(near)}" if near else ""
    raise NotFoundError(f"run_id {broker.run_id!r}: this broker knows no such run{known}")
