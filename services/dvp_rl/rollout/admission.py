"""How an engine's slots are shared: training on one side, clients' jobs and HTTP requests on the other.

Neither side waits for the other. While a trainer holds the run, clients generate no more samples at a time than their
share; training takes jobs for all that they leave. What both take beyond the engine's capacity waits in the engine, for
as long as one sample takes.
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
    """The slots of an engine with `capacity`. `client_share`: of them, what clients may have while a trainer holds the
    run, one slot at least. `divides`: a client's job may generate in parts; else one of them generates at a time."""

    def __init__(self, capacity: int, *, max_waiting: int, client_share: float, divides: bool = True) -> None:
        self.capacity = capacity
        self.divides = divides
        self.training = Training(self)
        self.clients = Clients(self, max(1, int(client_share * capacity)), max_waiting)
        self._trained = False
        self._changed = asyncio.Event()

    @property
    def in_flight(self) -> int:
        """Samples that generate or wait here."""
        return self.training.held + self.clients.held + self.clients.requested

    @property
    def trained(self) -> bool:
        """A trainer holds the run."""
        return self._trained

    @trained.setter
    def trained(self, trained: bool) -> None:
        self._trained = trained
        self.wake()

    async def change(self) -> None:
        """Returns when something may have become free."""
        self._changed.clear()
        await self._changed.wait()

    def wake(self) -> None:
        self._changed.set()


class Side:
    """What one of the two has taken on from the queue."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.held = 0
        """Samples of the jobs that this replica has claimed."""

    @property
    def free(self) -> int:
        """Samples for which more jobs may be claimed; below 1 when there is no room."""
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
        """Slots that they have, or that whoever is in line takes next."""
        return max(self.running, self.allowed) if self._line.locked() else self.running

    @property
    def requested(self) -> int:
        """Samples of HTTP requests."""
        return self.of_callers.total()

    @contextmanager
    def admit(self, n: int, caller: str = EVERYBODY) -> Iterator[None]:
        """Around an HTTP request of n samples. Raises OverloadedError if it would wait too long, or if the caller took
        more than it leaves free. The first one of all is taken whatever its n, and the first one of each caller with a
        name if there is room at all: it counts for half of that at most, as its samples stand in line like others."""
        limit, own = self.allowed + self.max_waiting, self.of_callers[caller]
        free = limit - self.requested
        if caller != EVERYBODY and not own:
            n = min(n, max(free // 2, 1))
        if self.requested and n > free:
            raise OverloadedError(
                f"{self.requested} samples of requests are in flight on this replica and {n} more exceed its limit of "
                f"{limit}",
                RETRY_AFTER_S,
            )
        if own and not fits(caller, own, n, free):
            raise OverloadedError(
                f"{own} samples of requests of {caller} are in flight on this replica and {n} more would leave room "
                f"for {free - n}: {RULE}",
                RETRY_AFTER_S,
            )
        self.of_callers[caller] += n
        try:
            yield
        finally:
            self.of_callers[caller] -= n

    async def turn(self, n: int) -> int:
        """Waits in line. How many of `n` samples may start now, at least 1; `ended` is to be told of each."""
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
