"""Prometheus metrics of one replica, in a registry of its own."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from dvp_rl.contract.group import Group
from dvp_rl.engines.protocol import Caching

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3600)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "HTTP requests answered", "route", "status")
        self.jobs = self._counter("jobs", "Queued jobs by how they ended on this replica", "outcome")
        self.samples = self._counter("samples", "Samples finished", "finish_reason")
        self.tokens = self._counter("tokens", "Tokens generated")
        self.turns = self._counter(
            "session_turns", "Turns of sessions, by why they opened another branch (none: they did not)", "fork"
        )
        self.swaps = self._counter("swaps", "Weight swaps", "outcome")
        self.canaries = self._counter("canaries", "Canaries drawn after swaps and between them", "outcome")
        self.canary_nats = Gauge(
            "dvp_rollout_canary_nats",
            "Differences of the last canary's log-probs from the trainer's",
            ["stat"],
            registry=self.registry,
        )
        self.generate_seconds = self._histogram("generate_seconds", "Time to generate one group")
        self.swap_seconds = self._histogram("swap_seconds", "Time to fetch, verify and load one weight version")
        self.in_flight = Gauge(
            "dvp_rollout_in_flight_samples", "Samples that generate or wait for the engine", registry=self.registry
        )
        self.version_seq = Gauge(
            "dvp_rollout_version_seq", "Sequence number of the weights served", registry=self.registry
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"dvp_rollout_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"dvp_rollout_{name}", text, buckets=SECONDS, registry=self.registry)

    def watch(self, engine: Caching) -> None:
        """Tells which tokens of prompts the engine had cached."""
        self.registry.register(_PromptTokens(engine))

    def tell_canary(self, mean: float, p99: float, largest: float, *, right: bool) -> None:
        self.canaries.labels("right" if right else "wrong").inc()
        for stat, nats in (("mean", mean), ("p99", p99), ("max", largest)):
            self.canary_nats.labels(stat).set(nats)

    def observe(self, group: Group) -> None:
        for sample in group.samples:
            self.samples.labels(sample.finish_reason).inc()
        self.tokens.inc(group.num_model_tokens)
        self.generate_seconds.observe(group.generate_s)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)


class _PromptTokens(Collector):
    def __init__(self, engine: Caching) -> None:
        self._engine = engine

    def collect(self) -> Iterator[CounterMetricFamily]:
        text = (
            "Tokens of the prompts of all samples, read by the model or cached from an earlier prompt, answer or sample"
        )
        family = CounterMetricFamily("dvp_rollout_prompt_tokens", text, labels=["source"])
        for source, number in self._engine.prompt_tokens._asdict().items():
            family.add_metric([source], number)
        yield family
