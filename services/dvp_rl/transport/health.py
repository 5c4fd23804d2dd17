"""The state of the queue, and what to do about it.

One read-only script takes all numbers at one moment; the rules are pure functions of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dvp_rl.contract.errors import UnavailableError
from dvp_rl.contract.http import (
    EpisodeHealth,
    QueueHealth,
    Reason,
    ReplicaHealth,
    ReplicaState,
    Severity,
    StreamHealth,
    TrainerHealth,
    Verdict,
)
from dvp_rl.contract.weights import WeightVersion

from .broker import MEMORY_SHARE, Broker
from .replicas import BACKLOG_EVERY_S, BEAT_S, MAX_REPLICAS, MISSED_BEATS, NUM_BACKLOGS

BEATING_S = 2 * BEAT_S
"""Longest silence in seconds of a replica that is called behind. One that is silent for longer may have been killed."""
LOST_S = BEAT_S * MISSED_BEATS
STALLED_S = 300.0
"""Age in seconds from which jobs count as stuck, if no job has finished for as long."""
STARVED_S = 15.0
"""Wait in seconds that indicates starvation; shorter waits are the normal alternation of generating and training."""
MISSED_S = 300.0
"""Time in seconds for which a lost replica is reported unless another one replaced it; later it is only listed."""
QUIET_S = 60.0
"""Time in seconds without a sign of any harness after which none seems to be there, if none plays: one after the other,
it may prepare for long. If some play, STALLED_S."""
CLIENTS_WAIT_S = 60.0
"""Longest acceptable wait of a client's job for a replica shared with a trainer, in seconds."""
NAMED = 5
"""Most replicas named in a detail."""


@dataclass(frozen=True)
class Snapshot:
    """Input of the rules."""

    jobs: StreamHealth
    client_jobs: StreamHealth
    groups: StreamHealth
    in_flight: int
    uncheckpointed: int
    dead: int
    duplicates: int
    replicas: tuple[ReplicaHealth, ...]
    trainer: TrainerHealth | None
    trainer_waiting_s: float
    newest_version: str
    """Last announced version; "" if there is none."""
    min_seq: int
    """Oldest weight seq that may take jobs."""
    used_memory: int
    maxmemory: int
    """The broker's memory limit, in bytes; 0 means no limit."""
    disk_refuses: bool
    """The broker's last write to its disk failed."""
    since_commit_s: float | None
    """Seconds since a replica last finished a job; None if none ever did."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """Event counts since the run began, by name."""
    scoring: int = 0
    """Number of completions whose rewards the trainer's next batch waits for."""
    client_wait_s: float = 0.0
    """Seconds that the next job of a client has waited for a replica."""
    client_bytes: int = 0
    """Memory that clients' jobs take or have reserved."""
    closed: str = ""
    """Reason why the queue is closed; "" if it is open."""
    finished: bool = False
    """The trainer has completed its last step."""
    backlogs: tuple[int, ...] = ()
    """The last NUM_BACKLOGS numbers of waiting jobs, measured every BACKLOG_EVERY_S, oldest first."""
    episodes: EpisodeHealth | None = None
    """None if the run never had any."""
    silent: str = ""
    """The played episode that has had no turn or heartbeat for that long, in words."""
    idle_s: float = 0.0
    """Seconds without a turn or heartbeat after which another harness gets that episode."""
    since_harness_s: float | None = None
    """Seconds since a harness last took, played or ended an episode; None if none ever did."""
    client_sessions: int = 0
    """Number of clients' open sessions."""

    @property
    def live(self) -> tuple[ReplicaHealth, ...]:
        return tuple(replica for replica in self.replicas if replica.state is not ReplicaState.LOST)

    @property
    def trainer_lives(self) -> bool:
        return self.trainer is not None and self.trainer.last_seen_s <= LOST_S

    @property
    def num_waiting(self) -> int:
        """Number of jobs that no replica has taken."""
        return self.jobs.backlog + self.client_jobs.backlog

    @property
    def num_jobs(self) -> int:
        return self.num_waiting + self.jobs.pending + self.client_jobs.pending

    @property
    def num_episodes(self) -> int:
        """Number of episodes that wait for a harness or are played."""
        return 0 if self.episodes is None else self.episodes.backlog + self.episodes.pending

    @property
    def work(self) -> str:
        """What is queued or runs."""
        jobs = [f"{self.num_jobs} jobs"] if self.num_jobs or not self.num_episodes else []
        episodes = [f"{self.num_episodes} episodes"] if self.num_episodes else []
        return " and ".join(jobs + episodes)

    @property
    def oldest_job_s(self) -> float:
        return max(self.jobs.oldest_age_s or 0.0, self.client_jobs.oldest_age_s or 0.0)

    @property
    def num_groups(self) -> int:
        return self.groups.backlog + self.groups.pending


# Each function returns the detail of its rule, with numbers; "" if the rule does not fire.


def broker_memory(s: Snapshot) -> str:
    if s.maxmemory == 0 or s.used_memory < MEMORY_SHARE * s.maxmemory:
        return ""
    clients = f"; clients' jobs use or have reserved {s.client_bytes / s.maxmemory:.0%}" if s.client_bytes else ""
    return f"the broker uses {s.used_memory / s.maxmemory:.0%} of its maxmemory{clients}"


def broker_disk(s: Snapshot) -> str:
    return "the broker's last write to its disk failed" if s.disk_refuses else ""


def no_replicas(s: Snapshot) -> str:
    if s.live or not (s.num_jobs or s.num_episodes or s.trainer_lives or s.replicas):
        return ""
    lost = _named(s.replicas)
    return f"no replica is alive while {s.work} wait" + (f"; last seen: {lost}" if lost else "")


def no_trainer(s: Snapshot) -> str:
    if s.trainer_lives or s.finished or not (s.num_groups or s.in_flight or s.trainer):
        return ""
    seen = "was never seen" if s.trainer is None else f"was last seen {s.trainer.last_seen_s:.0f} s ago"
    return f"the trainer {seen}, with {s.num_groups} groups waiting and {s.in_flight} jobs in flight"


def no_harness(s: Snapshot) -> str:
    if s.episodes is None or not s.num_episodes or s.finished or not s.live:
        return ""
    ages = [s.since_harness_s, None if s.episodes.pending else s.episodes.oldest_age_s]
    quiet_s = min((age for age in ages if age is not None), default=0.0)
    if quiet_s < (STALLED_S if s.episodes.pending else QUIET_S):
        return ""
    counts = f"{s.episodes.backlog} episodes wait and {s.episodes.pending} are played"
    return f"{counts}, but no harness has done anything for {quiet_s:.0f} s"


def stalled(s: Snapshot) -> str:
    if not s.live or s.oldest_job_s < STALLED_S or (s.since_commit_s is not None and s.since_commit_s < STALLED_S):
        return ""
    age = f"the oldest job is {s.oldest_job_s:.0f} s old"
    return f"{age} and no job has ended for {STALLED_S:.0f} s; alive: {_named(s.live)}"


def closed(s: Snapshot) -> str:
    return f"no new jobs are admitted ({s.closed}); {s.work} are still queued or running" if s.closed else ""


def wrong_weights(s: Snapshot) -> str:
    wrong = tuple(replica for replica in s.live if replica.wrong)
    if not wrong:
        return ""
    return f"{len(wrong)} of {len(s.live)} replicas: {_named(wrong)}; {wrong[0].id}: {wrong[0].wrong}"


def replicas_behind(s: Snapshot) -> str:
    beating = (replica for replica in s.live if replica.last_seen_s <= BEATING_S)
    behind = tuple(replica for replica in beating if _seq(replica.version) < s.min_seq)
    if not behind:
        return ""
    return f"{len(behind)} of {len(s.live)} replicas are too far behind {s.newest_version}: {_named(behind)}"


def replicas_lost(s: Snapshot) -> str:
    lost = _not_replaced([r for r in s.replicas if LOST_S < r.last_seen_s <= MISSED_S], s.live)
    if not lost or not s.live:
        return ""
    return f"{len(lost)} of {len(s.live) + len(lost)} replicas went silent without a graceful stop: {_named(lost)}"


def _not_replaced(lost: list[ReplicaHealth], live: tuple[ReplicaHealth, ...]) -> tuple[ReplicaHealth, ...]:
    """Lost replicas without a successor. A supervisor restarts a replica under a new name, so each live replica that
    started later replaces one lost before."""
    for age in sorted((replica.up_s for replica in live if replica.up_s is not None), reverse=True):
        gone_before = [replica for replica in lost if replica.last_seen_s >= age]
        if gone_before:
            lost.remove(min(gone_before, key=lambda replica: replica.last_seen_s))
    return tuple(lost)


def episodes_silent(s: Snapshot) -> str:
    if s.episodes is None or s.episodes.silent_s is None or s.episodes.silent_s < min(STALLED_S, s.idle_s / 2):
        return ""
    how_long = f"{s.episodes.silent_s:.0f} s of the {s.idle_s:g} s after which another harness gets it"
    return f"{s.silent} has had no turn or heartbeat for {how_long}; played now: {s.episodes.pending}"


def dead_letters(s: Snapshot) -> str:
    return f"{s.dead} jobs were given up" if s.dead else ""


def replicas_starved(s: Snapshot) -> str:
    waiting = s.groups.oldest_age_s or 0.0
    if not s.live or s.num_jobs or s.num_episodes or s.finished or not s.groups.backlog or waiting < STARVED_S:
        return ""
    return f"{len(s.live)} replicas have nothing to do while {s.groups.backlog} groups wait for the trainer"


def rewards_slow(s: Snapshot) -> str:
    if not s.trainer_lives or s.trainer_waiting_s < STARVED_S or not s.scoring:
        return ""
    return (
        f"{s.scoring} completions await their rewards; the trainer has waited {s.trainer_waiting_s:.0f} s for a batch"
    )


def _starved(s: Snapshot) -> bool:
    """The trainer waits for groups, and replicas could make some."""
    waits = s.trainer_lives and s.trainer_waiting_s >= STARVED_S
    return waits and bool(s.live) and not s.num_groups and not s.scoring


def harnesses_slow(s: Snapshot) -> str:
    if not _starved(s) or s.episodes is None or not s.episodes.backlog or no_harness(s):
        return ""
    playing = f"{s.episodes.backlog} episodes wait for a harness, and {s.episodes.pending} are being played"
    return f"{playing}; the trainer has waited {s.trainer_waiting_s:.0f} s for groups"


def trainer_starved(s: Snapshot) -> str:
    if not _starved(s) or (s.episodes is not None and s.episodes.backlog):
        return ""
    return f"the trainer has waited {s.trainer_waiting_s:.0f} s for groups; {s.work} are queued or running"


def clients_wait(s: Snapshot) -> str:
    shared = s.live and s.trainer_lives and not s.finished
    # If none is running, their share is not what holds them up.
    if s.client_wait_s < CLIENTS_WAIT_S or not shared or not s.client_jobs.pending:
        return ""
    waits = f"{s.client_jobs.backlog} clients' jobs wait for a replica, the next for {s.client_wait_s:.0f} s"
    return f"{waits}; running in their share of {len(s.live)} replicas: {s.client_jobs.pending}"


def growing_backlog(s: Snapshot) -> str:
    """Fires if the smallest backlog in the newer half of the history exceeds the largest in the older half."""
    half = len(s.backlogs) // 2
    if len(s.backlogs) < NUM_BACKLOGS or not s.num_waiting or min(s.backlogs[half:]) <= max(s.backlogs[:half]):
        return ""
    minutes = NUM_BACKLOGS * BACKLOG_EVERY_S / 60
    return f"{s.num_waiting} jobs wait for a replica, {s.num_waiting - s.backlogs[0]} more than {minutes:.0f} min ago"


def idle(s: Snapshot) -> str:
    if s.num_jobs or s.num_episodes or ((s.num_groups or s.in_flight) and not s.finished):
        return ""
    return "the run is finished and nothing is queued" if s.finished else "nothing is queued and nothing runs"


class Rule(NamedTuple):
    """One verdict. The web page, `dvp-queue`, the alerts and the operator's page all use these texts."""

    verdict: Verdict
    severity: Severity
    meaning: str
    remedy: str
    see: Callable[[Snapshot], str]


RULES: tuple[Rule, ...] = (
    Rule(
        Verdict.BROKER_DISK,
        Severity.CRITICAL,
        "the broker cannot write to its disk and refuses all writes",
        "free disk space where it keeps its data (CONFIG GET dir); everything then resumes by itself",
        broker_disk,
    ),
    Rule(
        Verdict.BROKER_MEMORY,
        Severity.CRITICAL,
        "the broker's memory is nearly full, so no new jobs are admitted",
        "let the trainer catch up, delete results that clients have read (dvp-queue results), or raise maxmemory",
        broker_memory,
    ),
    Rule(
        Verdict.NO_REPLICAS,
        Severity.CRITICAL,
        "no replica is alive, so no jobs are processed",
        "start one: dvp-rollout --model PATH --engine ... --redis-url URL --run-id ID",
        no_replicas,
    ),
    Rule(
        Verdict.NO_TRAINER,
        Severity.CRITICAL,
        "the trainer is gone, but its run is not finished",
        "start it again with the same config: it resumes from its last checkpoint",
        no_trainer,
    ),
    Rule(
        Verdict.NO_HARNESS,
        Severity.CRITICAL,
        "there are episodes to play, but no harness does anything",
        "start a harness, or see in its log why it takes none (POST /v1/episodes on any replica); dvp-queue sessions "
        "drop --silent-s takes episodes back from a dead one",
        no_harness,
    ),
    Rule(
        Verdict.STALLED,
        Severity.CRITICAL,
        "replicas are alive, but no job ends",
        "check the replicas' logs; a replica that hangs can be killed safely, its jobs go to another one",
        stalled,
    ),
    Rule(
        Verdict.CLOSED,
        Severity.WARNING,
        "somebody has closed the queue, so no new jobs are admitted",
        "open it again when the work is done: dvp-queue open",
        closed,
    ),
    Rule(
        Verdict.WRONG_WEIGHTS,
        Severity.WARNING,
        "replicas do not compute what the trainer does under the same weights; they take no work",
        "restart them; if that does not help, compare engine, dtype and settings with those of the other replicas",
        wrong_weights,
    ),
    Rule(
        Verdict.REPLICAS_BEHIND,
        Severity.WARNING,
        "replicas serve weights that are too old to take jobs",
        "check their logs for why they do not load the newest weights: can they read the weight folder?",
        replicas_behind,
    ),
    Rule(
        Verdict.REPLICAS_LOST,
        Severity.WARNING,
        "replicas died or hang; their jobs go to others",
        "restart those that are not back yet; a replica that hangs can be killed safely",
        replicas_lost,
    ),
    Rule(
        Verdict.EPISODES_SILENT,
        Severity.WARNING,
        "an episode is being played, but has had no turn or heartbeat for long",
        "see what its harness does (dvp-queue sessions list); another one gets the episode after episodes.idle_s, or "
        "at once by dvp-queue sessions drop",
        episodes_silent,
    ),
    Rule(
        Verdict.DEAD_LETTERS,
        Severity.WARNING,
        "jobs were given up; each dead letter holds its error",
        "read their errors and which can be replayed (dvp-queue dead list), fix the cause, then replay or drop them",
        dead_letters,
    ),
    Rule(
        Verdict.REPLICAS_STARVED,
        Severity.WARNING,
        "the trainer is the bottleneck: replicas have nothing to do while groups wait",
        "run fewer replicas, allow a larger max_staleness, or make the trainer faster",
        replicas_starved,
    ),
    Rule(
        Verdict.REWARDS_SLOW,
        Severity.WARNING,
        "rewards are the bottleneck: the trainer waits for the reward function",
        "raise reward.workers, or make the function faster; the trainer's log counts those that took too long",
        rewards_slow,
    ),
    Rule(
        Verdict.HARNESSES_SLOW,
        Severity.WARNING,
        "harnesses are the bottleneck: the trainer waits for groups while episodes wait for a harness",
        "run more harnesses, or let each play more episodes at once; if the replicas are full, add replicas",
        harnesses_slow,
    ),
    Rule(
        Verdict.TRAINER_STARVED,
        Severity.WARNING,
        "generation is the bottleneck: the trainer waits for groups",
        "add replicas, or allow a larger max_staleness",
        trainer_starved,
    ),
    Rule(
        Verdict.CLIENTS_WAIT,
        Severity.WARNING,
        "clients' jobs fill their share of the replicas, and more of them wait",
        "add replicas, change client_share, or delete jobs that nobody needs (DELETE /v1/jobs/{job_id})",
        clients_wait,
    ),
    Rule(
        Verdict.GROWING_BACKLOG,
        Severity.WARNING,
        "jobs come in faster than the replicas finish them",
        "add replicas, or submit more slowly",
        growing_backlog,
    ),
    Rule(Verdict.IDLE, Severity.INFO, "there is nothing to do", "nothing, or submit jobs", idle),
)
"""Rules, worst first: the first that fires gives the verdict; `ok` if none does."""


class Judgement(NamedTuple):
    verdict: Verdict
    reasons: tuple[Reason, ...]


def judge(snapshot: Snapshot) -> Judgement:
    reasons = tuple(
        Reason(verdict=rule.verdict, severity=rule.severity, detail=detail, remedy=rule.remedy)
        for rule in RULES
        if (detail := rule.see(snapshot))
    )
    return Judgement(reasons[0].verdict if reasons else Verdict.OK, reasons)


async def take_snapshot(broker: Broker) -> Snapshot:
    """The run's numbers. Raises UnavailableError, also if the run's keys hold values that no part of it writes."""
    reply = await broker.script("health", MAX_REPLICAS)
    try:
        return _snapshot(json.loads(reply.decode(errors="replace")))
    except (ArithmeticError, ValueError, TypeError, KeyError) as error:
        raise UnavailableError(f"run {broker.run_id}: its data in the broker is damaged: {error!r}") from None


def _snapshot(found: dict[str, Any]) -> Snapshot:
    # cjson encodes an empty array as {}, too.
    counters = {name: _int64(value) for name, value in found["counters"].items()}
    episodes = found.get("episodes", {})

    def since(name: str) -> float | None:
        at = counters.pop(name, None)
        return None if at is None else (found["now_ms"] - at) / 1000

    return Snapshot(
        jobs=_stream(found["jobs"], counters.get("redelivered", 0)),
        client_jobs=_stream(found["client_jobs"], counters.get("redelivered_clients", 0)),
        groups=_stream(found["groups"], counters.get("redelivered_groups", 0)),
        in_flight=found["in_flight"],
        uncheckpointed=found["uncheckpointed"],
        dead=found["dead"],
        duplicates=counters.get("duplicates", 0),
        replicas=tuple(_replica(fields) for fields in found["replicas"] or ()),
        trainer=_trainer(found["trainer"], found["now_ms"]),
        trainer_waiting_s=_finite(found["trainer"].get("waiting_s", 0.0)),
        scoring=_int64(found["trainer"].get("scoring", 0)),
        newest_version=found["version"] and _version(found["version"]),
        min_seq=_int64(found["min_seq"]),
        used_memory=found["used_memory"],
        maxmemory=found["maxmemory"],
        disk_refuses=found["disk_refuses"],
        since_commit_s=since("committed_at"),
        counters=counters,
        client_wait_s=found["client_wait_ms"] / 1000,
        client_bytes=found["client_bytes"],
        closed=found["closed"],
        finished=bool(_int64(found["trainer"].get("finished", 0))),
        backlogs=tuple(_int64(length) for length in found["backlogs"] or ()),
        episodes=_episodes(episodes, counters.get("redelivered_episodes", 0)) if episodes else None,
        silent=episodes.get("silent", ""),
        idle_s=episodes.get("idle_ms", 0) / 1000,
        since_harness_s=since("harness_at"),
        client_sessions=found["client_sessions"],
    )


async def who_plays(broker: Broker) -> str:
    """Human-readable: how many episodes of the run wait for a harness, and how many are played."""
    found = (await take_snapshot(broker)).episodes
    waiting, played = (0, 0) if found is None else (found.backlog, found.pending)
    return f"{waiting} episodes wait for a harness (POST /v1/episodes on any replica), and {played} are being played"


async def queue_health(broker: Broker) -> QueueHealth:
    """Consistent numbers and verdict, taken by one read-only script. Cheap enough to poll."""
    return report(broker.run_id, await take_snapshot(broker))


def report(run_id: str, snapshot: Snapshot) -> QueueHealth:
    """The snapshot's numbers with their verdict."""
    verdict, reasons = judge(snapshot)
    return QueueHealth(
        run_id=run_id,
        jobs=snapshot.jobs,
        client_jobs=snapshot.client_jobs,
        episodes=snapshot.episodes,
        client_sessions=snapshot.client_sessions,
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


def _int64(value: str | int) -> int:
    number = int(value)
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError("an integer of more than 64 bits")
    return number


def _version(text: str) -> str:
    _int64(WeightVersion.parse(text).seq)
    return text


def _finite(value: str | float) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"not a finite number: {value!r}")
    return number


def _stream(found: dict[str, Any], redelivered: int) -> StreamHealth:
    return StreamHealth(
        backlog=found["backlog"],
        pending=found["pending"],
        oldest_age_s=_seconds(found["oldest_ms"]),
        redelivered=redelivered,
    )


def _episodes(found: dict[str, Any], redelivered: int) -> EpisodeHealth:
    return EpisodeHealth(
        backlog=found["waiting"],
        pending=found["played"],
        oldest_age_s=_seconds(found["waited_ms"]),
        redelivered=redelivered,
        silent_s=_seconds(found["silent_ms"]),
    )


def _seconds(milliseconds: float) -> float | None:
    """None if negative, which means that there is nothing to measure."""
    return None if milliseconds < 0 else milliseconds / 1000


def _replica(fields: dict[str, Any]) -> ReplicaHealth:
    last_seen_s = fields["age_ms"] / 1000
    state = ReplicaState.LOST if last_seen_s > LOST_S else ReplicaState(fields["state"])
    return ReplicaHealth(
        id=fields["id"],
        state=state,
        version=_version(fields["version"]),
        in_flight=_int64(fields["in_flight"]),
        last_seen_s=last_seen_s,
        up_s=fields["up_ms"] / 1000 if "up_ms" in fields else None,
        wrong=fields.get("wrong", ""),
    )


def _trainer(fields: dict[str, str], now_ms: int) -> TrainerHealth | None:
    if not fields:
        return None
    last_seen_s = max(0.0, (now_ms - _int64(fields["at"])) / 1000)
    return TrainerHealth(step=_int64(fields["step"]), version=fields["version"], last_seen_s=last_seen_s)


def _seq(version: str) -> int:
    return WeightVersion.parse(version).seq


def _named(replicas: tuple[ReplicaHealth, ...]) -> str:
    names = [f"{replica.id} ({replica.state}, {replica.version})" for replica in replicas[:NAMED]]
    return ", ".join(names + (["..."] if len(replicas) > NAMED else []))
