"""Heartbeats: which replicas are alive, and on which version. All times come from the broker's clock."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import NamedTuple

from dvp_rl.contract.http import ReplicaState
from dvp_rl.contract.weights import WeightVersion

from .broker import Broker

BEAT_S = 2.0
"""Interval between heartbeats, in seconds."""
MISSED_BEATS = 5
"""Number of missed heartbeats after which a replica or the trainer is lost."""
BACKLOG_EVERY_S = 30.0
NUM_BACKLOGS = 10
"""Interval in seconds at which replicas' heartbeats measure the backlog, and number of measurements kept."""
MAX_REPLICAS = 512
"""Most replicas listed: the most recently seen ones."""


@dataclass(frozen=True)
class ReplicaBeat:
    id: str
    state: ReplicaState
    version: str
    in_flight: int
    capacity: int = 0
    loading: str = ""
    """The version being loaded; "" if none. Sweeps keep it like the one served."""
    error: str = ""
    """Reason why the newest version is not served."""
    swaps_s: float = 0.0
    """Seconds spent on weight swaps since the start."""
    wrong: str = ""
    """How the engine differs from the trainer under the weights served; "" if it is not known to."""

    def __post_init__(self) -> None:
        WeightVersion.parse(self.version)


@dataclass(frozen=True)
class TrainerBeat:
    step: int
    version: str
    waiting_s: float = 0.0
    """Seconds that the trainer has waited for groups; 0 while it trains."""
    scoring: int = 0
    """Number of completions whose rewards the next batch waits for; 0 while it waits for groups."""
    finished: int = 0
    """1 once the last step is done and the trainer is about to end."""


class Told(NamedTuple):
    """What a trainer wants to know of a replica's last heartbeat."""

    swaps_s: float
    wrong: str


class ReplicaRegistry:
    def __init__(self, broker: Broker) -> None:
        self.broker = broker

    async def beat(self, beat: ReplicaBeat) -> bool:
        """Records a heartbeat. Returns True if a trainer holds the run."""
        return bool(await self.broker.script("beat", beat.id, int(1000 * BACKLOG_EVERY_S), NUM_BACKLOGS, *_pairs(beat)))

    async def beat_trainer(self, beat: TrainerBeat, *, fence: int) -> None:
        await self.broker.script("beat_trainer", fence, *_pairs(beat))

    async def seqs_in_use(self) -> frozenset[int]:
        """Weight seqs that replicas serve or load, lost replicas included because they may come back."""
        texts = [replica.get(name) for replica in await self._listed() for name in ("version", "loading")]
        seqs = set[int]()
        for text in filter(None, texts):
            with suppress(ValueError):  # not written by a replica of ours
                seqs.add(WeightVersion.parse(text).seq)
        return frozenset(seqs)

    async def told(self) -> dict[str, Told]:
        """By replica id."""
        found: dict[str, Told] = {}
        for replica in await self._listed():
            with suppress(ValueError):  # as above
                found[replica["id"]] = Told(float(replica.get("swaps_s", "0")), replica.get("wrong", ""))
        return found

    async def _listed(self) -> list[dict[str, str]]:
        reply = await self.broker.script("health", MAX_REPLICAS)
        return json.loads(reply.decode(errors="replace"))["replicas"] or []

    async def leave(self, replica_id: str) -> None:
        """Removes a replica that stops gracefully."""
        await self.broker.script("leave", replica_id)


def _pairs(beat: ReplicaBeat | TrainerBeat) -> list[str | int | float]:
    return [part for pair in asdict(beat).items() for part in pair]
