"""The state of the queue, and what to do about it.

One read-only script takes the numbers, so that they belong together; the rules are pure functions over them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from services.contract.http import (
    QueueHealth,
    Reason,
    ReplicaHealth,
    ReplicaState,
    StreamHealth,
    TrainerHealth,
    Verdict,
)
from services.contract.weights import WeightVersion

from .broker import MEMORY_SHARE, Broker
from .replicas import BEAT_S, MAX_REPLICAS, MISSED_BEATS

LOST_S = BEAT_S * MISSED_BEATS
STALLED_S = 300.0
"""Jobs that are older, with no result for as long, count as stuck."""
STARVED_S = 15.0
"""Waiting shorter than this is the normal alternation of generating and training."""
NAMED = 5
"""Replicas that a detail names."""


@dataclass(frozen=True)
class Snapshot:
    """What the rules look at."""

    jobs: StreamHealth
    groups: StreamHealth
    in_flight: int
    uncheckpointed: int
    dead: int
    duplicates: int
    replicas: tuple[ReplicaHealth, ...]
    trainer: TrainerHealth | None
    trainer_waiting_s: float
    newest_version: str
    """Announced last; "" when none was."""
    min_seq: int
    """Oldest weight seq that may take jobs."""
    used_memory: int
    maxmemory: int
    """0: no limit."""
    since_commit_s: float | None
    """Since a replica last finished a job; None when none ever did."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """What happened since the run began, by name."""
    closed: str = ""
    """Why no jobs are admitted; "" when they are."""

    @property
    def live(self) -> tuple[ReplicaHealth, ...]:
        return tuple(replica for replica in self.replicas if replica.state is not ReplicaState.LOST)

    @property
    def trainer_lives(self) -> bool:
        return self.trainer is not None and self.trainer.last_seen_s <= LOST_S

    @property
    def num_jobs(self) -> int:
        return self.jobs.backlog + self.jobs.pending

    @property
    def num_groups(self) -> int:
        return self.groups.backlog + self.groups.pending


Rule = Callable[[Snapshot], Reason | None]


def broker_memory(s: Snapshot) -> Reason | None:
    if s.maxmemory == 0 or s.used_memory < MEMORY_SHARE * s.maxmemory:
        return None
    return Reason(
        verdict=Verdict.BROKER_MEMORY,
        detail=f"the broker uses {s.used_memory / s.maxmemory:.0%} of its maxmemory; no new jobs are admitted",
        remedy="let the trainer catch up, or raise maxmemory",
    )


def closed(s: Snapshot) -> Reason | None:
    if not s.closed:
        return None
    return Reason(
        verdict=Verdict.CLOSED,
        detail=f"no new jobs are admitted ({s.closed}); {s.num_jobs} are still queued or running",
        remedy="open it again when the work is done: dvp-queue open",
    )


def no_replicas(s: Snapshot) -> Reason | None:
    if s.live or not (s.num_jobs or s.trainer_lives or s.replicas):
        return None
    lost = _named(s.replicas)
    return Reason(
        verdict=Verdict.NO_REPLICAS,
        detail=f"no replica is alive while {s.num_jobs} jobs wait" + (f"; last seen: {lost}" if lost else ""),
        remedy="start one: dvp-rollout --model PATH --engine ... --redis-url URL --run-id ID",
    )


def no_trainer(s: Snapshot) -> Reason | None:
    if s.trainer_lives or not (s.num_groups or s.in_flight or s.trainer):
        return None
    seen = "was never seen" if s.trainer is None else f"was last seen {s.trainer.last_seen_s:.0f} s ago"
    return Reason(
        verdict=Verdict.NO_TRAINER,
        detail=f"the trainer {seen}, with {s.num_groups} groups waiting and {s.in_flight} jobs in flight",
        remedy="start it again with the same config: it resumes from its last checkpoint",
    )


def stalled(s: Snapshot) -> Reason | None:
    age = s.jobs.oldest_age_s or 0.0
    if not s.live or age < STALLED_S or (s.since_commit_s is not None and s.since_commit_s < STALLED_S):
        return None
    return Reason(
        verdict=Verdict.STALLED,
        detail=f"the oldest job is {age:.0f} s old and no job has ended for {STALLED_S:.0f} s; alive: {_named(s.live)}",
        remedy="look at the replicas' logs; one that hangs can be killed safely, its jobs go to another",
    )


def replicas_behind(s: Snapshot) -> Reason | None:
    behind = tuple(replica for replica in s.live if _seq(replica.version) < s.min_seq)
    if not behind:
        return None
    return Reason(
        verdict=Verdict.REPLICAS_BEHIND,
        detail=f"{len(behind)} of {len(s.live)} replicas serve weights too old to take jobs: {_named(behind)}",
        remedy=f"look at why they do not load {s.newest_version}: is the weight folder on a volume they can read?",
    )


def dead_letters(s: Snapshot) -> Reason | None:
    if s.dead == 0:
        return None
    return Reason(
        verdict=Verdict.DEAD_LETTERS,
        detail=f"{s.dead} jobs were given up; each dead letter holds its error",
        remedy="read the errors (dvp-queue dead list), mend the cause, then replay or drop them",
    )


def replicas_starved(s: Snapshot) -> Reason | None:
    waiting = s.groups.oldest_age_s or 0.0
    if not s.live or s.num_jobs or not s.groups.backlog or waiting < STARVED_S:
        return None
    return Reason(
        verdict=Verdict.REPLICAS_STARVED,
        detail=f"{len(s.live)} replicas have nothing to do while {s.groups.backlog} groups wait for the trainer",
        remedy="the trainer is the bottleneck: fewer replicas, a larger max_staleness or a faster trainer",
    )


def trainer_starved(s: Snapshot) -> Reason | None:
    if not s.trainer_lives or s.trainer_waiting_s < STARVED_S or s.num_groups or not s.live:
        return None
    return Reason(
        verdict=Verdict.TRAINER_STARVED,
        detail=f"the trainer has waited {s.trainer_waiting_s:.0f} s for groups; {s.num_jobs} jobs are in work",
        remedy="generation is the bottleneck: add replicas or allow more staleness",
    )


def idle(s: Snapshot) -> Reason | None:
    if s.num_jobs or s.num_groups or s.in_flight:
        return None
    return Reason(verdict=Verdict.IDLE, detail="nothing is queued and nothing runs", remedy="submit jobs")


RULES: tuple[Rule, ...] = (
    broker_memory,
    no_replicas,
    no_trainer,
    stalled,
    closed,
    replicas_behind,
    dead_letters,
    replicas_starved,
    trainer_starved,
    idle,
)
"""Worst first: the first that fires is the verdict."""


class Judgement(NamedTuple):
    verdict: Verdict
    reasons: tuple[Reason, ...]


def judge(snapshot: Snapshot) -> Judgement:
    reasons = tuple(reason for rule in RULES if (reason := rule(snapshot)))
    return Judgement(reasons[0].verdict if reasons else Verdict.OK, reasons)


async def take_snapshot(broker: Broker) -> Snapshot:
    found = json.loads(await broker.script("health", MAX_REPLICAS))
    # cjson writes an empty table as {}, whatever it was.
    counters = {name: int(value) for name, value in found["counters"].items()}
    committed_at = counters.get("committed_at")
    return Snapshot(
        jobs=_stream(found["jobs"], counters.get("redelivered", 0)),
        groups=_stream(found["groups"], counters.get("redelivered_groups", 0)),
        in_flight=found["in_flight"],
        uncheckpointed=found["uncheckpointed"],
        dead=found["dead"],
        duplicates=counters.get("duplicates", 0),
        replicas=tuple(_replica(fields) for fields in found["replicas"] or ()),
        trainer=_trainer(found["trainer"], found["now_ms"]),
        trainer_waiting_s=float(found["trainer"].get("waiting_s", 0.0)),
        newest_version=found["version"],
        min_seq=int(found["min_seq"]),
        used_memory=found["used_memory"],
        maxmemory=found["maxmemory"],
        since_commit_s=None if committed_at is None else (found["now_ms"] - committed_at) / 1000,
        counters=counters,
        closed=found["closed"],
    )


async def queue_health(broker: Broker) -> QueueHealth:
    """One read-only script, so the numbers belong together. Cheap enough to poll."""
    return report(broker.run_id, await take_snapshot(broker))


def report(run_id: str, snapshot: Snapshot) -> QueueHealth:
    """The numbers with their verdict."""
    verdict, reasons = judge(snapshot)
    return QueueHealth(
        run_id=run_id,
        jobs=snapshot.jobs,
        groups=snapshot.groups,
        uncheckpointed=snapshot.uncheckpointed,
        dead=snapshot.dead,
        duplicates=snapshot.duplicates,
        in_flight=snapshot.in_flight,
        replicas=snapshot.replicas,
        trainer=snapshot.trainer,
        verdict=verdict,
        reasons=reasons,
    )


def _stream(found: dict[str, Any], redelivered: int) -> StreamHealth:
    age = found["oldest_ms"]
    return StreamHealth(
        backlog=found["backlog"],
        pending=found["pending"],
        oldest_age_s=None if age < 0 else age / 1000,
        redelivered=redelivered,
    )


def _replica(fields: dict[str, Any]) -> ReplicaHealth:
    last_seen_s = fields["age_ms"] / 1000
    state = ReplicaState.LOST if last_seen_s > LOST_S else ReplicaState(fields["state"])
    return ReplicaHealth(
        id=fields["id"],
        state=state,
        version=fields["version"],
        in_flight=int(fields["in_flight"]),
        last_seen_s=last_seen_s,
    )


def _trainer(fields: dict[str, str], now_ms: int) -> TrainerHealth | None:
    if not fields:
        return None
    last_seen_s = max(0.0, (now_ms - int(fields["at"])) / 1000)
    return TrainerHealth(step=int(fields["step"]), version=fields["version"], last_seen_s=last_seen_s)


def _seq(version: str) -> int:
    return WeightVersion.parse(version).seq


def _named(replicas: tuple[ReplicaHealth, ...]) -> str:
    names = [f"{replica.id} ({replica.state}, {replica.version})" for replica in replicas[:NAMED]]
    return ", ".join(names + (["..."] if len(replicas) > NAMED else []))
