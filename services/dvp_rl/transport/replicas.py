"""Heartbeats: who is alive, on which version. Times are the broker's, so nobody's clock matters."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass

from dvp_rl.contract.http import ReplicaState
from dvp_rl.contract.weights import WeightVersion

from .broker import Broker

BEAT_S = 2.0
"""Seconds between heartbeats."""
MISSED_BEATS = 5
"""A replica, or the trainer, is lost after that many missed."""
BACKLOG_EVERY_S = 30.0
NUM_BACKLOGS = 10
"""How often the backlog is measured along with a replica's heartbeat, and how many measurements are kept."""
MAX_REPLICAS = 512
"""Listed at most; the most recently seen ones."""


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
    swaps_s: float = 0.0
    """Seconds that it has spent on weight swaps since it started."""

    def __post_init__(self) -> None:
        WeightVersion.parse(self.version)


@dataclass(frozen=True)
class TrainerBeat:
    step: int
    version: str
    waiting_s: float = 0.0
    """Seconds that the trainer has been waiting for groups; 0 while it trains."""
    finished: int = 0
    """1: it has done its last step and is about to end."""


class ReplicaRegistry:
    def __init__(self, broker: Broker) -> None:
        self.broker = broker

    async def beat(self, beat: ReplicaBeat) -> bool:
        """True if a trainer holds the run."""
        return bool(await self.broker.script("beat", beat.id, int(1000 * BACKLOG_EVERY_S), NUM_BACKLOGS, *_pairs(beat)))

    async def beat_trainer(self, beat: TrainerBeat, *, fence: int) -> None:
        await self.broker.script("beat_trainer", fence, *_pairs(beat))

    async def seqs_in_use(self) -> frozenset[int]:
        """Weight seqs that some replica serves or loads, the lost ones included: they may come back."""
        texts = [replica.get(name) for replica in await self._listed() for name in ("version", "loading")]
        seqs = set[int]()
        for text in filter(None, texts):
            with suppress(ValueError):  # no replica of ours wrote it
                seqs.add(WeightVersion.parse(text).seq)
        return frozenset(seqs)

    async def swaps_s(self) -> dict[str, float]:
        """Seconds that each replica has spent on weight swaps since it started."""
        found: dict[str, float] = {}
        for replica in await self._listed():
            with suppress(ValueError):  # as above
                found[replica["id"]] = float(replica.get("swaps_s", "0"))
        return found

    async def _listed(self) -> list[dict[str, str]]:
        reply = await self.broker.script("health", MAX_REPLICAS)
        return json.loads(reply.decode(errors="replace"))["replicas"] or []

    async def leave(self, replica_id: str) -> None:
        """Graceful stop: forgets this replica at once."""
        await self.broker.script("leave", replica_id)


def _pairs(beat: ReplicaBeat | TrainerBeat) -> list[str | int | float]:
    return [part for pair in asdict(beat).items() for part in pair]
