"""The whole system as `make demo` starts it, for benchmarks: an embedded Valkey, replicas, a trainer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from deploy.demo.__main__ import TASKS, TaskName
from deploy.demo.run_folder import claim
from dvp_trainer.config import TrainSettings
from dvp_trainer.report.sinks import read_metrics
from dvp_trainer.up.replica import flags

WARM_UP = 3
"""Steps left out of the means: start-up and the first swap."""
TIMEOUT_S = 1800.0
REPLICAS = {"up.dtype": "bfloat16", "up.options": '{"max_batch": 256, "threads": 1}'}
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
    config: Path = TASKS[TaskName.SUMS].config,
    options: Mapping[str, object],
) -> Outcome:
    own = {"seed": seed, "steps": steps, "out_dir": out.absolute(), **REPLICAS, "up.replicas": replicas, **options}
    settings = TrainSettings.load(flags(own), config)
    with claim(out), (out / "trainer.log").open("wb") as log:
        command = [sys.executable, "-m", "dvp_trainer", "up", config, *flags(own)]
        subprocess.run(command, stdout=log, stderr=log, timeout=TIMEOUT_S, check=True)
    records = read_metrics(out / "metrics.jsonl")
    return Outcome(list(map(dict, records)), settings.batch.groups * settings.sampling.n)
