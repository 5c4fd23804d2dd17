"""How an engine's slots are shared between training on one side, clients' jobs and HTTP requests on the other.

Neither side waits for the other. While a trainer holds the run, clients generate at most their share of the samples at
a time, and training takes jobs for all slots that they leave. Samples beyond the engine's capacity wait in the engine,
for as long as one sample takes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from dvp_rl.contract.errors import OverloadedError
from dvp_rl.contract.shares import EVERYBODY, RULE, fits

RETRY_AFTER_S = 1.0


class Slots:
    """The slots of an engine with `capacity`. `client_share`: the fraction that clients may have while a trainer holds
    the run, at least one slot. `divides`: clients' jobs may generate in parts; if not, one of them generates at a
    time, undivided."""

    def __init__(self, capacity: int, *, max_waiting: int, client_share: float, divides: bool = True) -> None:
        self.capacity = capacity
        self.divides = divides
        self.training = Training(self)
        self.clients = Clients(self, max(1, int(client_share * capacity)), max_waiting)
        self._trained = False
        self._changed = asyncio.Event()

    @property
    def in_flight(self) -> int:
        """Samples that generate or wait on this replica."""
        return self.training.held + self.clients.held + self.clients.requested

    @property
    def trained(self) -> bool:
        """Whether a trainer holds the run."""
        return self._trained

    @trained.setter
    def trained(self, trained: bool) -> None:
        self._trained = trained
        self.wake()

    async def change(self) -> None:
        """Returns when slots may have become free."""
        self._changed.clear()
        await self._changed.wait()

    def wake(self) -> None:
        self._changed.set()


class Side:
    """Jobs that one side has claimed from its queue, and room for more."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.held = 0
        """Samples of the jobs that this replica has claimed."""

    @property
    def free(self) -> int:
        """Samples for which more jobs may be claimed; below 1 if there is no room."""
        raise NotImplementedError

    @contextmanager
    def hold(self, n: int) -> Iterator[None]:
        self.held += n
        try:
            yield
        finally:
            self.held -= n
            self.slots.wake()

    async def wait_free(self) -> int:
        """`free`, once it is at least 1."""
        while self.free < 1:
            await self.slots.change()
        return self.free


class Training(Side):
    @property
    def free(self) -> int:
        capacity, clients = self.slots.capacity, self.slots.clients
        return max(1, capacity - clients.share, capacity - clients.taken) - self.held


class Clients(Side):
    def __init__(self, slots: Slots, share: int, max_waiting: int) -> None:
        super().__init__(slots)
        self.share = share
        self.max_waiting = max_waiting
        self.of_callers: Counter[str] = Counter()
        """Samples of HTTP requests, by caller."""
        self.running = 0
        """Samples that generate; the others wait for their turn."""
        self._line = asyncio.Lock()

    @property
    def allowed(self) -> int:
        """Samples that may generate at a time."""
        return self.share if self.slots.trained else self.slots.capacity

    @property
    def free(self) -> int:
        return self.allowed - self.held

    @property
    def taken(self) -> int:
        """Slots in use by clients; while samples wait in line, at least all allowed ones, as those take them next."""
        return max(self.running, self.allowed) if self._line.locked() else self.running

    @property
    def requested(self) -> int:
        """Samples of HTTP requests."""
        return self.of_callers.total()

    @contextmanager
    def admit(self, n: int, caller: str = EVERYBODY) -> Iterator[None]:
        """Admits an HTTP request of n samples until the context ends. Raises OverloadedError beyond the limit of
        samples, or if the caller would take more than it leaves free. With no other request here, any n is admitted.
        A named caller's first request is admitted if there is room at all, and counts for at most half of that room,
        as its samples wait in line like any others."""
        limit, own, asked = self.allowed + self.max_waiting, self.of_callers[caller], n
        free = limit - self.requested
        if caller != EVERYBODY and not own:
            n = min(n, max(free // 2, 1))
        if self.requested and n > free:
            raise OverloadedError(
                f"{self.requested} samples of requests are in flight on this replica and {asked} more exceed its limit "
                f"of {self._limited(limit)}",
                RETRY_AFTER_S,
            )
        if own and not fits(caller, own, n, free):
            raise OverloadedError(
                f"{own} samples of requests of {caller} are in flight on this replica and {n} more would leave room "
                f"for {free - n} of {self._limited(limit)}; {RULE}",
                RETRY_AFTER_S,
            )
        self.of_callers[caller] += n
        try:
            yield
        finally:
            self.of_callers[caller] -= n

    def _limited(self, limit: int) -> str:
        """The limit, with the settings behind it."""
        share = f" (client_share of {self.slots.capacity})" if self.slots.trained else ""
        return f"{limit}, {self.allowed} that generate{share} and {self.max_waiting} that wait (max_waiting)"

    async def turn(self, n: int) -> int:
        """Waits in line and returns how many of `n` samples may start, at least 1. Call `ended` for each of them."""
        async with self._line:
            while not (granted := self._room(n)):
                await self.slots.change()
            self.running += granted
            return granted

    def _room(self, n: int) -> int:
        room = self.allowed - self.running
        if self.slots.divides:
            return max(0, min(n, room))
        return 0 if self.running else n

    def ended(self, n: int) -> None:
        self.running -= n
        self.slots.wake()
