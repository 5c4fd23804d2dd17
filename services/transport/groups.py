"""The trainer's side of the groups and evals streams: read, settle, acknowledge after the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from services.contract.group import DeadLetter, Group
from services.contract.job import Sink

from .broker import Broker


@dataclass(frozen=True)
class Delivery:
    entry_id: str
    sink: Sink
    item: Group | DeadLetter
    """A DeadLetter is the tombstone of a job that never becomes a group."""

    @property
    def job_id(self) -> str:
        return self.item.job_id


class GroupQueue:
    """`fence` is TrainerLease.token; a trainer that another one replaced gets LeaseLostError from every method."""

    def __init__(self, broker: Broker, *, fence: int) -> None:
        raise NotImplementedError

    async def read(self, count: int, block_ms: int, sink: Sink = Sink.TRAIN) -> list[Delivery]:
        """Up to `count` deliveries, each exactly once per GroupQueue; [] after `block_ms`. What an earlier trainer read
        and never acknowledged comes first. Undecodable entries become dead letters."""
        raise NotImplementedError

    async def settle(self, *, trained: Iterable[str] = (), dropped: Iterable[str] = ()) -> None:
        """These train jobs leave the in-flight count (making room to submit) and await their checkpoint."""
        raise NotImplementedError

    async def acknowledge(self, deliveries: Iterable[Delivery]) -> None:
        """After the checkpoint that covers them (or for jobs that an earlier one covers): forgets them for good."""
        raise NotImplementedError

    async def restore(self, outstanding: Iterable[str]) -> None:
        """On resume: the in-flight set becomes `outstanding` (less the dead), and nothing awaits a checkpoint."""
        raise NotImplementedError
