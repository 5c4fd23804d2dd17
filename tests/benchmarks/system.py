"""The whole system as `make demo` starts it, for benchmarks: an embedded Valkey, replicas, a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from deploy.demo.__main__ import CONFIG, READY_TIMEOUT_S, Demo, Server, load_settings
from deploy.demo.fleet import Fleet
from deploy.demo.run_folder import claim
from services.rollout.settings import EngineName
from services.transport.embedded import EmbeddedBroker
from trainer.reporting import read_metrics

WARM_UP = 3
"""Steps left out: start-up and the first swap."""
TIMEOUT_S = 1800.0
SIDES = ("generate", "reward", "train", "publish")


class Outcome(NamedTuple):
    """Of one training run."""

    records: list[dict[str, Any]]
    """One per step, as in metrics.jsonl."""
    swap_s: float
    """Seconds in which a replica verified and loaded a version, on average."""
    samples_per_step: int

    @property
    def steady(self) -> list[dict[str, Any]]:
        return self.records[WARM_UP:]

    @property
    def step_s(self) -> float:
        return self.mean("time/step_s")

    @property
    def samples_per_second(self) -> float:
        return self.samples_per_step / self.step_s

    def mean(self, key: str) -> float:
        return fmean(record.get(key, 0.0) for record in self.steady)

    def idle(self) -> dict[str, float]:
        """Share of the time in which each side stood still. Every step has its swap."""
        return {side: self.mean(f"idle/{side}") for side in SIDES} | {"swap": 1 - self.swap_s / self.step_s}


def run_system(
    out: Path,
    steps: int,
    *,
    seed: int = 0,
    replicas: int = 2,
    config: Path = CONFIG,
    options: Mapping[str, object],
) -> Outcome:
    settings = load_settings(seed, steps, out, config=config, options=options)
    demo = Demo(settings, EngineName.TRANSFORMERS, replicas, TIMEOUT_S, Console(quiet=True), config, options)
    with claim(out) as folder, EmbeddedBroker(out / "broker") as broker, Fleet(folder.logs) as fleet:
        servers = [demo.start_replica(fleet, folder, broker.url, f"replica-{i}") for i in range(1, replicas + 1)]
        fleet.wait_until(lambda: all(s.is_ready() for s in servers), "every replica is ready", READY_TIMEOUT_S)
        fleet.wait_for(demo.start_trainer(fleet, broker.url), TIMEOUT_S)
        swap_s = _swap_seconds(servers)
        records = read_metrics(folder.metrics)
    return Outcome(list(map(dict, records)), swap_s, settings.batch.groups * settings.sampling.n)


def _swap_seconds(servers: list[Server]) -> float:
    totals = {"sum": 0.0, "count": 0.0}
    for server in servers:
        port = server.port_file.read_text().strip()
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                for name in totals:
                    if sample.name == f"dvp_rollout_swap_seconds_{name}":
                        totals[name] += sample.value
    return totals["sum"] / max(totals["count"], 1)
