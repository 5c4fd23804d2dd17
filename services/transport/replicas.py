"""Heartbeats: who is alive, on which version. Times are the broker's, so nobody's clock matters."""

from __future__ import annotations

from dataclasses import dataclass

from services.contract.http import ReplicaHealth, ReplicaState, TrainerHealth

from .broker import Broker

BEAT_S = 2.0
"""Seconds between heartbeats."""
MISSED_BEATS = 5
"""A replica is LOST after that many missed."""


@dataclass(frozen=True)
class ReplicaBeat:
    id: str
    state: ReplicaState
    version: str
    in_flight: int
    capacity: int = 0
    loading: str = ""
    """The version being loaded; "" when none. Kept by sweeps like the one served."""
    error: str = ""
    """Why the newest version is not served."""


@dataclass(frozen=True)
class TrainerBeat:
    step: int
    version: str
    waiting_s: float = 0.0
    """Seconds that the trainer has been waiting for groups; 0 while it trains."""


class ReplicaRegistry:
    def __init__(self, broker: Broker) -> None:
        raise NotImplementedError

    async def beat(self, beat: ReplicaBeat) -> None:
        raise NotImplementedError

    async def beat_trainer(self, beat: TrainerBeat, *, fence: int) -> None:
        raise NotImplementedError

    async def replicas(self) -> list[ReplicaHealth]:
        """All that were ever seen and not forgotten; LOST ones included."""
        raise NotImplementedError

    async def trainer(self) -> TrainerHealth | None:
        raise NotImplementedError

    async def seqs_in_use(self) -> frozenset[int]:
        """Weight seqs that some replica serves or loads."""
        raise NotImplementedError

    async def leave(self, replica_id: str) -> None:
        """Graceful stop: forgets this replica at once."""
        raise NotImplementedError
