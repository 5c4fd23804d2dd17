"""The trainer's side of the groups and evals streams: read, settle, and acknowledge after the checkpoint."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import ResponseError

from dvp_rl.contract.errors import LeaseLostError, RequestError
from dvp_rl.contract.group import DeadLetter, Group
from dvp_rl.contract.job import Sink
from dvp_rl.contract.keys import TRAINER

from .broker import Broker

logger = logging.getLogger(__name__)

FIRST = "0-0"
FETCH_BYTES = 4 * 1024 * 1024
"""Most bytes of groups per broker reply, unless one group is larger: the broker buffers a copy of each reply, and a
group may have 64 MiB."""


Entry = tuple[str, dict[bytes, bytes]]
"""Id and fields of a stream entry."""


@dataclass(frozen=True)
class Delivery:
    entry_id: str
    sink: Sink
    item: Group | DeadLetter
    """A DeadLetter is the tombstone of a job that never becomes a group."""

    @property
    def job_id(self) -> str:
        return self.item.job_id


@dataclass
class _Inbox:
    """This trainer's state of one stream."""

    sink: Sink
    stream: str
    recovering: bool = True
    """The next read takes over entries that are pending for any consumer before it reads new ones."""
    cursor: str = FIRST
    delivered: set[str] = field(default_factory=set)
    """Ids of entries that were returned and not acknowledged."""


class GroupQueue:
    """A run's groups, as one trainer sees them. `fence` is TrainerLease.token; once another trainer took over, every
    method that calls the broker raises LeaseLostError."""

    def __init__(self, broker: Broker, *, fence: int) -> None:
        self.broker = broker
        self._fence = fence
        self._consumer = f"trainer/{fence}"
        streams = {Sink.TRAIN: broker.keys.groups, Sink.EVAL: broker.keys.evals}
        self._inboxes = {sink: _Inbox(sink, stream) for sink, stream in streams.items()}

    async def read(self, count: int, block_ms: int, sink: Sink = Sink.TRAIN) -> list[Delivery]:
        """Up to `count` deliveries, each exactly once per GroupQueue; [] after `block_ms`. Entries that an earlier
        trainer read and never acknowledged come first. Undecodable entries become dead letters."""
        inbox = self._inboxes[sink]
        await self._check_fence()
        while inbox.recovering:
            if deliveries := await self._recover(inbox, count):
                return deliveries
        entries = await self.broker.read_group(inbox.stream, TRAINER, self._consumer, count, block_ms)
        if not entries and await self._pending(inbox) != len(inbox.delivered):
            inbox.recovering = True
        return await self._deliver(inbox, entries)

    async def _check_fence(self) -> None:
        """Raises LeaseLostError if a newer trainer took over. XREADGROUP cannot block inside a script, so the check is
        not atomic with it: entries that a stopped trainer reads late are recovered by the new one when it is idle."""
        async with self.broker.call():
            newest = await self.broker.redis.get(self.broker.keys.fence)
        if newest is not None and int(newest) > self._fence:
            raise LeaseLostError(f"another trainer took over run {self.broker.run_id}")

    async def _recover(self, inbox: _Inbox, count: int) -> list[Delivery]:
        """Takes over one page of entries pending for any trainer, including our own whose reply was lost."""
        inbox.recovering = False  # before the call, because look_again may be called meanwhile
        reply = await self.broker.script("takeover", self._fence, inbox.stream, self._consumer, count, inbox.cursor)
        entries = [(entry_id.decode(), dict(zip(*[iter(flat)] * 2, strict=True))) for entry_id, flat in reply]
        inbox.recovering |= bool(entries)
        inbox.cursor = entries[-1][0] if entries else FIRST
        return await self._deliver(inbox, entries)

    async def _pending(self, inbox: _Inbox) -> int:
        async with self.broker.call():
            try:
                summary = await self.broker.redis.xpending(inbox.stream, TRAINER)
            except ResponseError as error:
                if not str(error).startswith("NOGROUP"):
                    raise
                return 0  # the broker was wiped; the next read creates the group
        pending: int = summary["pending"]
        return pending

    async def _deliver(self, inbox: _Inbox, entries: Sequence[Entry]) -> list[Delivery]:
        """Decodes entries, except those delivered before: a broker that lost its last writes repeats them."""
        deliveries: list[Delivery] = []
        async for entry_id, fields, data in self._with_data([e for e in entries if e[0] not in inbox.delivered]):
            try:
                item = DeadLetter.from_bytes(data[0]) if fields.get(b"kind") == b"dead" else _group(data)
            except RequestError as error:
                logger.warning("entry %s of the %s stream is not a group: %s", entry_id, inbox.sink, error)
                await self.broker.script("bury_group", self._fence, inbox.stream, entry_id, f"not a group: {error}")
            else:
                deliveries.append(Delivery(entry_id, inbox.sink, item))
        inbox.delivered.update(delivery.entry_id for delivery in deliveries)
        return deliveries

    async def _with_data(self, entries: Sequence[Entry]) -> AsyncIterator[tuple[str, dict[bytes, bytes], list[bytes]]]:
        """Each entry with its records: one that is in the entry itself or, for a group, in a key beside the stream; of
        episodes that a harness played, one for each."""
        keys = self.broker.keys
        for page in _pages(entries):
            async with self.broker.call(), self.broker.redis.pipeline(transaction=False) as calls:
                for _, fields in page:
                    job_id = fields.get(b"id", b"").decode(errors="replace")
                    if fields.get(b"kind") == b"episodes":
                        calls.hgetall(keys.played(job_id))
                    elif b"size" in fields:
                        calls.get(keys.result(job_id))
                groups: Iterator[Any] = iter(await calls.execute())
            for entry_id, fields in page:
                found = next(groups) if b"size" in fields else fields.get(b"data")
                records = [found[index] for index in sorted(found, key=int)] if isinstance(found, dict) else [found]
                yield entry_id, fields, [record or b"" for record in records]

    def look_again(self) -> None:
        """Makes the next `read` look for entries that were read but never delivered, even if the counts agree."""
        for inbox in self._inboxes.values():
            inbox.recovering = True

    async def settle(self, *, trained: Iterable[str] = (), dropped: Iterable[str] = ()) -> None:
        """Removes train jobs from the in-flight count, which makes room to submit; they then await their checkpoint."""
        for outcome, job_ids in (("trained", list(trained)), ("dropped", list(dropped))):
            if job_ids:
                await self.broker.script("settle", self._fence, outcome, *job_ids)

    async def acknowledge(self, deliveries: Iterable[Delivery]) -> None:
        """Deletes deliveries for good. Call it after a checkpoint that covers them, this or an earlier one."""
        everything = list(deliveries)
        for sink, inbox in self._inboxes.items():
            mine = [delivery for delivery in everything if delivery.sink is sink]
            if mine:
                pairs = [(delivery.entry_id, delivery.job_id) for delivery in mine]
                await self.broker.script("acknowledge", self._fence, inbox.stream, *(x for pair in pairs for x in pair))
                inbox.delivered.difference_update(delivery.entry_id for delivery in mine)

    async def restore(self, outstanding: Iterable[str]) -> None:
        """Resets the state on resume: `outstanding` (minus the dead) is in flight, nothing awaits a checkpoint."""
        await self.broker.script("restore", self._fence, *outstanding)

    async def recount(self, outstanding: Iterable[str]) -> int:
        """Removes all other jobs from the in-flight set and returns their number: a broker that lost its last writes
        counts jobs that have ended. Must not run while jobs are being submitted."""
        gone: int = await self.broker.script("recount", self._fence, *outstanding)
        return gone


def _group(records: Sequence[bytes]) -> Group:
    """Raises RequestError."""
    groups = [Group.from_bytes(record) for record in records]
    if not groups:
        raise RequestError("Group: none of its episodes is there")
    return Group.joined(groups) if groups[0].rewards else groups[0]


def _pages(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Pages whose groups take at most FETCH_BYTES together; a larger group has a page of its own."""
    page: list[Entry] = []
    size = 0
    for entry_id, fields in entries:
        size_text = fields.get(b"size", b"")
        own = int(size_text) if size_text.isdigit() and len(size_text) < 20 else 0
        if page and size + own > FETCH_BYTES:
            yield page
            page, size = [], 0
        page.append((entry_id, fields))
        size += own
    if page:
        yield page
