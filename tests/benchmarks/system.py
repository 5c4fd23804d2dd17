"""The whole system as `make demo` starts it, for benchmarks: an embedded Valkey, replicas, a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rich.console import Console

from deploy.demo.__main__ import CONFIG, READY_TIMEOUT_S, Demo, load_settings
from deploy.demo.fleet import Fleet
from deploy.demo.run_folder import claim
from dvp_rl.rollout.settings import EngineName
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_trainer.report.sinks import read_metrics

WARM_UP = 3
"""Steps left out of the means: start-up and the first swap."""
TIMEOUT_S = 1800.0
SIDES = ("generate", "reward", "train", "publish", "swap")


class Outcome(NamedTuple):
    """Records of one training run."""

    records: list[dict[str, Any]]
    """One per step, as in metrics.jsonl."""
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
        """Share of the time in which each stage was idle."""
        return {side: fmean(r[f"idle/{side}"] for r in self.steady if f"idle/{side}" in r) for side in SIDES}


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
        records = read_metrics(folder.metrics)
    return Outcome(list(map(dict, records)), settings.batch.groups * settings.sampling.n)
