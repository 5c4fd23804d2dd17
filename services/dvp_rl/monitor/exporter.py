"""Queue health for Prometheus, from the poller's last snapshot: a scrape costs the broker nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from dvp_rl.contract.http import ReplicaState, Verdict
from dvp_rl.contract.weights import WeightVersion
from dvp_rl.transport.health import Snapshot, judge

Metric = GaugeMetricFamily | CounterMetricFamily

EVENTS = ("submitted", "committed", "trained", "dropped", "dead", "cancelled", "overdue", "replayed")
"""Counters of the run that count jobs."""


def exposition(look: Callable[[], Snapshot | None]) -> bytes:
    """The metrics as Prometheus text. `look` returns the last snapshot, None while the broker does not answer."""
    registry = CollectorRegistry()
    registry.register(_Queue(look))
    return generate_latest(registry)


class _Queue(Collector):
    def __init__(self, look: Callable[[], Snapshot | None]) -> None:
        self._look = look

    def collect(self) -> Iterator[Metric]:
        seen = self._look()
        yield _gauge("up", "1 if the broker answers", float(seen is not None))
        if seen is not None:
            yield from _streams(seen)
            yield from _numbers(seen)
            yield from _replicas(seen)
            yield from _verdicts(seen)


def _streams(seen: Snapshot) -> Iterator[Metric]:
    streams = {"jobs": seen.jobs, "episodes": seen.episodes, "client_jobs": seen.client_jobs, "groups": seen.groups}
    backlog = _gauge("backlog", "Entries that nobody has read", label="stream")
    pending = _gauge("pending", "Entries that were read and not yet finished", label="stream")
    oldest = _gauge("oldest_age_seconds", "Age of the oldest entry, 0 when there is none", label="stream")
    redelivered = _counter("redelivered", "Entries that were redelivered", label="stream")
    for name, stream in streams.items():
        if stream is None:
            continue
        backlog.add_metric([name], stream.backlog)
        pending.add_metric([name], stream.pending)
        oldest.add_metric([name], stream.oldest_age_s or 0.0)
        redelivered.add_metric([name], stream.redelivered)
    yield from (backlog, pending, oldest, redelivered)


def _numbers(seen: Snapshot) -> Iterator[Metric]:
    yield _gauge("in_flight_jobs", "Train jobs submitted and not yet trained, dropped or dead", seen.in_flight)
    yield _gauge("uncheckpointed_groups", "Groups that no checkpoint covers yet", seen.uncheckpointed)
    yield _gauge("dead_letters", "Dead letters that nobody has replayed or dropped", seen.dead)
    yield _gauge("closed", "1 while no jobs are admitted", float(bool(seen.closed)))
    yield _counter("duplicates", "Results discarded because their job had already ended", seen.duplicates)
    jobs = _counter("jobs", "Jobs by what happened to them", label="event")
    for event in EVENTS:
        jobs.add_metric([event], seen.counters.get(event, 0))
    yield jobs
    yield _gauge("broker_memory_used_bytes", "Memory of the broker in use", seen.used_memory)
    yield _gauge("broker_memory_max_bytes", "maxmemory of the broker, 0 without a limit", seen.maxmemory)
    yield _gauge("client_bytes", "Broker memory that clients' jobs use or have reserved", seen.client_bytes)
    yield _gauge("client_sessions", "Open sessions of clients", seen.client_sessions)
    if seen.episodes is not None:
        silent = (
            "Longest time that an episode which a harness plays has had no turn or heartbeat, 0 when none is played"
        )
        yield _gauge("episode_silent_seconds", silent, seen.episodes.silent_s or 0.0)
    if seen.trainer is not None:
        yield _gauge("trainer_step", "Step of the trainer", seen.trainer.step)
        yield _gauge("trainer_silent_seconds", "Time since the trainer's last heartbeat", seen.trainer.last_seen_s)
        yield _gauge("trainer_waiting_seconds", "Time that the trainer has waited for groups", seen.trainer_waiting_s)


def _replicas(seen: Snapshot) -> Iterator[Metric]:
    replicas = _gauge("replicas", "Replicas by state", label="state")
    states = Counter(replica.state for replica in seen.replicas)
    for state in ReplicaState:
        replicas.add_metric([state], states[state])
    yield replicas
    newest = WeightVersion.parse(seen.newest_version).seq if seen.newest_version else 0
    lags = [newest - WeightVersion.parse(replica.version).seq for replica in seen.live]
    yield _gauge("replica_lag_versions_max", "Versions that the slowest replica is behind", max(lags, default=0))


def _verdicts(seen: Snapshot) -> Iterator[Metric]:
    verdict, reasons = judge(seen)
    worst = _gauge("verdict", "1 for the verdict, 0 for the others", label="verdict")
    firing = _gauge("reason", "1 for every rule that fires", label="verdict")
    fired = {reason.verdict for reason in reasons}
    for name in Verdict:
        worst.add_metric([name], float(name is verdict))
        firing.add_metric([name], float(name in fired))
    yield from (worst, firing)


def _gauge(name: str, text: str, value: float | None = None, *, label: str | None = None) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"dvp_queue_{name}", text, value=value, labels=None if label is None else [label])


def _counter(name: str, text: str, value: float | None = None, *, label: str | None = None) -> CounterMetricFamily:
    return CounterMetricFamily(f"dvp_queue_{name}", text, value=value, labels=None if label is None else [label])
