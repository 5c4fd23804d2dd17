"""What the trainer has asked for, what came back, and how each attempt ended. Nothing here waits, reads or writes.

Every data position ends exactly once, through one or more attempts. The broker may forget what it holds of an attempt
only when a checkpoint covers its end.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable
from enum import StrEnum

from dvp_rl.contract.job import Job, job_position
from dvp_rl.transport.groups import Delivery


class Outcome(StrEnum):
    """How an attempt ended; the first three end its position too."""

    TRAINED = "trained"
    FILTERED = "filtered"
    """No signal, replaced by another prompt (refill)."""
    DEAD = "dead"
    STALE = "stale"
    REFUSED = "refused"
    """The group broke the contract: another policy, another prompt, log-probs that are not constrained."""


COMES_BACK = (Outcome.STALE, Outcome.REFUSED)
DUPLICATES = "duplicates"


class Books:
    """Jobs by id, deliveries by the id of their job."""

    def __init__(self, cursor: int = 0, retries: Iterable[tuple[int, int]] = ()) -> None:
        """Empty, or as a checkpoint has them; what was outstanding then is to `expect` again."""
        self.cursor = cursor
        """Positions below this were issued."""
        self.retries = sorted(retries)
        """(position, attempt) to be issued again."""
        self.outstanding: dict[str, Job] = {}
        self.unsent: dict[str, Job] = {}
        """Outstanding, and not taken by the broker."""
        self.arrived: dict[str, Delivery] = {}
        """What outstanding jobs waited for."""
        self.early: dict[str, Delivery] = {}
        """What attempts will wait for that are not issued yet: a lost timeline had issued them."""
        self.ended: list[Delivery] = []
        """No checkpoint covers them."""
        self.covered: list[Delivery] = []
        """The newest checkpoint does; the broker may forget them."""
        self.counts: Counter[str] = Counter()
        """How attempts ended, and duplicates."""

    def issue(self, wanted: int, make_job: Callable[[int, int], Job]) -> list[Job]:
        """New jobs until `wanted` are outstanding: attempts that come back first, then the next positions."""
        issued = []
        while len(self.outstanding) < wanted:
            position, attempt = heapq.heappop(self.retries) if self.retries else (self.cursor, 0)
            self.cursor = max(self.cursor, position + 1)
            issued.append(make_job(position, attempt))
            self.expect(issued[-1])
        return issued

    def expect(self, job: Job) -> None:
        self.outstanding[job.job_id] = self.unsent[job.job_id] = job

    def arrive(self, delivery: Delivery) -> bool:
        """True if an outstanding job waited for it; the others are kept until a checkpoint, or until their attempt."""
        id = delivery.job_id
        # Asked for again after it had ended, a broker that was wiped in between would start it anew.
        self.unsent.pop(id, None)
        for held in (self.arrived, self.early):
            if id in held:
                # The broker lost what it had told, and has told it anew: that is what it must keep until a checkpoint.
                self._drop_duplicate(held[id])
                held[id] = delivery
                return False
        if id in self.outstanding:
            self.arrived[id] = delivery
            return True
        if self._comes_later(id):
            self.early[id] = delivery
        else:
            self._drop_duplicate(delivery)
        return False

    def finish(self, ids: Iterable[str], outcome: Outcome) -> None:
        """Closes these attempts, which have arrived."""
        for id in ids:
            del self.outstanding[id]
            self.ended.append(self.arrived.pop(id))
            self.counts[outcome] += 1
            if outcome in COMES_BACK:
                position, attempt = job_position(id)
                heapq.heappush(self.retries, (position, attempt + 1))
            else:
                self._forget_later_attempts(id)

    def cover(self) -> None:
        """A checkpoint is about to be written: `covered` is what has ended by now, and no more."""
        self.covered, self.ended = [*self.covered, *self.ended], []

    def missing(self) -> dict[str, Job]:
        """Outstanding jobs that nothing came back of."""
        return {id: job for id, job in self.outstanding.items() if id not in self.arrived}

    def _drop_duplicate(self, delivery: Delivery) -> None:
        self.counts[DUPLICATES] += 1
        self.ended.append(delivery)

    def _comes_later(self, id: str) -> bool:
        """True if this attempt may be issued yet: its position was not, or only for an earlier attempt."""
        position, attempt = job_position(id)
        current = dict([*map(job_position, self.outstanding), *self.retries])
        return position >= self.cursor or attempt >= current.get(position, math.inf)

    def _forget_later_attempts(self, id: str) -> None:
        """The position has ended: what a lost timeline went on to draw for it is of no use."""
        of_position = f"{id.rpartition(':')[0]}:"
        for later in [early for early in self.early if early.startswith(of_position)]:
            self._drop_duplicate(self.early.pop(later))
