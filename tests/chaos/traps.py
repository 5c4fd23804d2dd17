"""Chooses the fail point at which a new process dies, until each has been hit often enough."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from random import Random

from dvp_rl.transport import failpoints
from dvp_rl.transport.roles import SCRIPTS


class Role(StrEnum):
    REPLICA = "replica"
    TRAINER = "trainer"
    OPERATOR = "operator"
    HARNESS = "harness"
    GATEWAY = "gateway"


REPLICA = ("create_groups", "beat", "start", "expire", "renew", "commit", "fail", "release", "abandon", "leave", "swap")
CLIENTS = (
    *("submit_client", "delete", "read.replicas"),
    *("session_open", "session_beat", "session_append", "session_finish", "session_delete", "episode_take"),
)
"""Fail points of a replica that clients' calls reach."""
OPERATOR = ("close", "open", "health", "letters", "pending", "sessions", "replay", "discard", "purge")
AT_STOP = ("release", "abandon", "leave", "lease_release")
"""Fail points that only a process that is asked to stop reaches."""
AT_START = ("refused", "lease_acquire", "takeover", "restore")


def all_points() -> list[str]:
    names = sorted(SCRIPTS.keys() - {"prelude"})
    return [f"{name}.{side}" for name in names for side in ("before", "after")] + [*failpoints.BESIDES_SCRIPTS]


def role_of(point: str) -> Role:
    name = point.rpartition(".")[0]
    if name in OPERATOR:
        return Role.OPERATOR
    return Role.REPLICA if name in (*REPLICA, *CLIENTS) else Role.TRAINER


def is_at_stop(point: str | None) -> bool:
    return point is not None and point.rpartition(".")[0] in AT_STOP


def is_passed_once(point: str) -> bool:
    """Whether a process usually passes the point only once, so that a trap at a later pass would hardly ever be hit."""
    return point.rpartition(".")[0] in (*AT_START, *AT_STOP, *OPERATOR)


class Traps:
    def __init__(self, hits: int, rng: Random) -> None:
        self._rng = rng
        self.missing = Counter({point: hits for point in all_points()})
        self.hits: Counter[str] = Counter({point: 0 for point in all_points()})
        self._armed: Counter[str] = Counter()

    def take(self, role: Role) -> str | None:
        """A fail point at which a new process dies; sometimes None, so that the run also makes progress."""
        open_points = [p for p, n in self.missing.items() if role_of(p) is role and n > self._armed[p]]
        if not open_points or (role is not Role.OPERATOR and self._rng.random() < 0.1):
            return None
        point = self._rng.choice(open_points)
        self._armed[point] += 1
        return point

    def give_back(self, point: str | None, *, hit: bool) -> None:
        """Returns the trap of a process that has ended; `hit` if the trap killed it."""
        if point is None:
            return
        self._armed[point] -= 1
        self.hits[point] += hit
        self.missing[point] -= hit

    def missing_of(self, role: Role) -> int:
        return sum(n for point, n in self.missing.items() if role_of(point) is role)

    @property
    def left(self) -> int:
        return sum(self.missing.values())
