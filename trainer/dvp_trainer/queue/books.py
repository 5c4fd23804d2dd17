"""The trainer's books: submitted jobs, deliveries, and how each attempt ended. Nothing here waits or does I/O.

Every data position ends exactly once, through one or more attempts. The broker may delete the data of an attempt only
once a checkpoint covers the attempt's end.
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
    """The group violates the contract: wrong policy, wrong prompt, or log-probs that are not constrained."""


COMES_BACK = (Outcome.STALE, Outcome.REFUSED)
DUPLICATES = "duplicates"


class Books:
    """Jobs by id, deliveries by the id of their job."""

    def __init__(self, cursor: int = 0, retries: Iterable[tuple[int, int]] = ()) -> None:
        """Creates empty books, or those of a checkpoint, whose outstanding jobs the caller passes to `expect` again."""
        self.cursor = cursor
        """Positions below this were issued."""
        self.retries = sorted(retries)
        """(position, attempt) to issue next."""
        self.outstanding: dict[str, Job] = {}
        self.unsent: dict[str, Job] = {}
        """Outstanding jobs that the broker has not accepted."""
        self.arrived: dict[str, Delivery] = {}
        """Deliveries for outstanding jobs."""
        self.early: dict[str, Delivery] = {}
        """Deliveries for attempts not issued yet, which a lost timeline had issued."""
        self.ended: list[Delivery] = []
        """Deliveries of ended attempts that no checkpoint covers."""
        self.covered: list[Delivery] = []
        """Deliveries that the newest checkpoint covers; the broker may delete them."""
        self.counts: Counter[str] = Counter()
        """Number of attempts by outcome, and of duplicates."""

    def issue(self, wanted: int, make_job: Callable[[int, int], Job]) -> list[Job]:
        """Issues and returns new jobs until `wanted` are outstanding: retries first, then the next positions."""
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
        """Records a delivery; True if an outstanding job was waiting for it. Others are kept until their attempt is
        issued, or as duplicates until a checkpoint."""
        id = delivery.job_id
        # Submitted again after it has ended, to a broker wiped in between, the job would start anew.
        self.unsent.pop(id, None)
        for held in (self.arrived, self.early):
            if id in held:
                # The broker lost the first delivery and repeated it; it must keep the new one until a checkpoint.
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
        """Ends these attempts, whose deliveries have arrived; stale and refused ones become retries."""
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
        """Moves what has ended by now to `covered`; called just before a checkpoint is written."""
        self.covered, self.ended = [*self.covered, *self.ended], []

    def missing(self) -> dict[str, Job]:
        """Outstanding jobs without a delivery."""
        return {id: job for id, job in self.outstanding.items() if id not in self.arrived}

    def _drop_duplicate(self, delivery: Delivery) -> None:
        self.counts[DUPLICATES] += 1
        self.ended.append(delivery)

    def _comes_later(self, id: str) -> bool:
        """True if this attempt may still be issued: its position has not been, or is at an earlier attempt."""
        position, attempt = job_position(id)
        current = dict([*map(job_position, self.outstanding), *self.retries])
        return position >= self.cursor or attempt >= current.get(position, math.inf)

    def _forget_later_attempts(self, id: str) -> None:
        """Drops early deliveries of later attempts, which a lost timeline had issued: the position has ended."""
        of_position = f"{id.rpartition(':')[0]}:"
        for later in [early for early in self.early if early.startswith(of_position)]:
            self._drop_duplicate(self.early.pop(later))
