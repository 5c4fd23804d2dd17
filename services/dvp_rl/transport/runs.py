"""The runs of a broker: which there are, closing a queue so that it drains, removing a run."""

from __future__ import annotations

import re
from difflib import get_close_matches

from redis.exceptions import NoPermissionError

from dvp_rl.contract.errors import NotFoundError
from dvp_rl.contract.keys import Keys
from dvp_rl.contract.weights import RUN_ID

from .broker import Broker
from .health import LOST_S

SCAN_COUNT = 1_000
MAX_SCANS, NEAR_SCANS = 1_000, 100
"""Most calls of SCAN to list the runs, and to find one that was meant: a broker may hold very many keys."""
MAX_DIGITS = 19
"""Most digits of a 64-bit number."""
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
    await broker.script("purge", "any" if force else "idle", int(1000 * LOST_S), by)
    removed, cursor = 0, None
    while cursor != 0:
        async with broker.call():
            cursor, keys = await broker.redis.scan(cursor or 0, broker.keys.everything, SCAN_COUNT)
            keys = [key for key in keys if key != broker.keys.audit.encode()]
            removed += await broker.redis.unlink(*keys) if keys else 0
    return removed


async def check_run(broker: Broker) -> None:
    """Raises NotFoundError, which names some existing runs, if the broker knows nothing of this run."""
    if await is_known(broker):
        return
    names = await list_runs(broker, NEAR_SCANS)
    near = get_close_matches(broker.run_id, names) or names[:MAX_NAMED]
    known = f"; runs there: {', '.join(near)}" if near else ""
    raise NotFoundError(f"run_id {broker.run_id!r}: this broker knows no such run{known}")


async def is_known(broker: Broker) -> bool:
    """Whether the broker holds anything of this run."""
    keys = broker.keys
    async with broker.call():
        return bool(await broker.redis.exists(keys.jobs, keys.versions, keys.dead, keys.replicas))


async def latest_runs(broker: Broker) -> list[str]:
    """The runs of the broker that its user may see: those with a live trainer by name, then the one whose trainer was
    seen last, and so on."""
    names = await list_runs(broker, MAX_SCANS)
    async with broker.call(), broker.redis.pipeline(transaction=False) as each:
        for name in names:
            each.hget(Keys(name).trainer, "at")
        beats = await each.execute(raise_on_error=False)
    seen = {name: _ms(at) for name, at in zip(names, beats, strict=True) if not isinstance(at, NoPermissionError)}
    alive = max(seen.values(), default=0) - int(1000 * LOST_S)
    return sorted(seen, key=lambda name: -min(seen[name], alive))


def _ms(at: object) -> int:
    return int(at) if isinstance(at, bytes) and at.isdigit() and len(at) <= MAX_DIGITS else 0


async def list_runs(broker: Broker, scans: int) -> list[str]:
    """Names of the runs that have a queue on this broker, in alphabetical order, as `scans` calls of SCAN find them."""
    before, after = Keys("*").jobs.split("*")
    names, cursor = set[str](), 0
    for _ in range(scans):
        async with broker.call():
            cursor, keys = await broker.redis.scan(cursor, Keys("*").jobs, SCAN_COUNT)
        raw = [key for key in keys if isinstance(key, bytes)]
        found = [key.decode(errors="replace").removeprefix(before).removesuffix(after) for key in raw]
        names.update(name for name in found if re.fullmatch(RUN_ID, name))
        if cursor == 0:
            break
    return sorted(names)
