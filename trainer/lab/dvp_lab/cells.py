"""Training runs in separate processes, several at a time. Each run leaves one file, so that a stopped study resumes: a
run is repeated only if its settings have changed or its file is missing."""

from __future__ import annotations

import json
import math
import resource
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, as_completed
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from .training import Run

Metrics = dict[str, list[float | None]]
KEPT = (
    "reward/mean",
    "mismatch/kl",
    "mismatch/outside_rate",
    "grad/norm",
    "kept/mass_mean_infer",
    "veto/total",
    "mis/fraction",
    "mis/kept_weight",
    "optimizer/updates",
)


class Outcome(NamedTuple):
    metrics: Metrics
    """One number per step for each name in KEPT; None if the step does not report it, as without a training signal."""
    cpu_s: float

    def mean(self, name: str, start: int = 0, stop: int | None = None) -> float:
        """The mean over the steps [start, stop) that report the metric; NaN if none does."""
        values = [value for value in self.metrics[name][start:stop] if value is not None]
        return fmean(values) if values else math.nan


def run_cells(runs: Mapping[str, Run], folder: Path, pool: Executor) -> Iterator[tuple[str, Outcome]]:
    """Yields each run's name and outcome, stored runs first. If a run fails, those not yet started are cancelled."""
    folder.mkdir(parents=True, exist_ok=True)
    due = {}
    for name, run in runs.items():
        found = _read(folder / f"{name}.json", run)
        if found is None:
            due[name] = run
        else:
            yield name, found
    futures = {pool.submit(_make, run, folder / f"{name}.json"): name for name, run in due.items()}
    try:
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        for future in futures:
            future.cancel()


def _read(path: Path, run: Run) -> Outcome | None:
    if not path.is_file():
        return None
    stored = json.loads(path.read_text())
    return Outcome(stored["metrics"], stored["cpu_s"]) if stored["run"] == _settings(run) else None


def _make(run: Run, path: Path) -> Outcome:
    torch.set_num_threads(1)
    before = _cpu_s()
    metrics: Metrics = {name: [] for name in KEPT}
    for step in run:
        for name in KEPT:
            metrics[name].append(step.get(name))
    outcome = Outcome(metrics, _cpu_s() - before)
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps({"run": _settings(run), **outcome._asdict()}))
    beside.rename(path)
    return outcome


def _settings(run: Run) -> dict[str, Any]:
    """The settings as JSON returns them. They name only the model's own folder, so that its parent may be moved."""
    settings: dict[str, Any] = json.loads(json.dumps(asdict(run) | {"model": run.model.name}))
    return settings


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
