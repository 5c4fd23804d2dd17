"""Training curves from the trainer's metrics.jsonl."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, TypeGuard

from dvp_rl.contract.metrics import (
    DRIFTED,
    FORKS,
    LARGEST,
    MAX_METRICS,
    TOOL_CALLS,
    TOOL_ERRORS,
    TURNS,
    mean_of,
    own_metrics,
)

from .bodies import Curves, Histogram, Line, Panel
from .growing import GrowingFile

MAX_POINTS = 240


class Drawn(NamedTuple):
    title: str
    caption: str
    unit: str
    lines: dict[str, str]
    """Label of each metric."""


PANELS = (
    Drawn(
        "Reward",
        "mean of a batch and of the held-out set",
        "reward",
        {"reward/mean": "train", "heldout/score": "held-out"},
    ),
    Drawn(
        "KL between the policies",
        "π_infer against π_train on sampled tokens",
        "nats per token",
        {"mismatch/kl": "KL"},
    ),
    Drawn(
        "Veto",
        "share of sequences dropped, by reason",
        "share of sequences",
        {"veto/outside": "outside the safe set", "veto/numerical": "numerical", "veto/nan": "NaN"},
    ),
    Drawn("Importance masking", "share of weights above the bound", "share of weights", {"mis/fraction": "masked"}),
    Drawn(
        "Kept mass",
        "probability that pruning leaves, mean over positions",
        "probability",
        {"kept/mass_mean_train": "trainer", "kept/mass_mean_infer": "replicas"},
    ),
    Drawn(
        "Staleness",
        "age of the weights that drew the samples",
        "batches",
        {"staleness/mean": "mean", "staleness/max": "max"},
    ),
    Drawn(
        "Tokens per episode",
        "mean of a batch, by origin",
        "tokens",
        {"length/mean": "drawn", "length/environment_mean": "environment"},
    ),
    Drawn(
        "Turns per episode",
        "mean of a batch, with calls of tools and those that failed",
        "number",
        {mean_of(TURNS): "turns", mean_of(TOOL_CALLS): "tool calls", mean_of(TOOL_ERRORS): "tool errors"},
    ),
    Drawn(
        "Rewritten histories",
        "per episode: other versions of its history, and turns that drifted from the record",
        "number",
        {mean_of(FORKS): "forks", mean_of(DRIFTED): "drifted"},
    ),
)
STALENESS_BINS = tuple(f"staleness/groups_{behind}" for behind in range(9))
"""Metrics that count the groups by batches behind; the last one also counts all that were older."""
RECENT_STEPS = 100
"""Steps that the histogram covers."""
WANTED = frozenset(name for panel in PANELS for name in panel.lines).union(STALENESS_BINS)


class MetricsFile:
    """The trainer's metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self._forget()

    def _forget(self) -> None:
        self._damaged = 0
        self._points: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._times: list[tuple[float, float]] = []
        self._own: dict[str, str] = {}
        """Metrics that only this run has: at most MAX_METRICS, those that come first."""

    def look(self) -> Curves | None:
        """The curves; None if nothing is new."""
        grown = self._file.look()
        if grown is None:
            return None
        if grown.error:
            return Curves(error=grown.error)
        if grown.anew:
            self._forget()
        for line in grown.lines:
            self._take(line)
        return self._curves()

    def _take(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            step = record["step"]
        except (ValueError, TypeError, KeyError, RecursionError):
            step = None
        if not _is_number(step):
            self._damaged += 1
            return
        if len(self._own) < MAX_METRICS:
            self._own = own_metrics([*self._own, *record])
        for name in record.keys() & (WANTED | self._own.keys()):
            if _is_number(value := record[name]):
                self._points[name].append((step, float(value)))
        if _is_number(time := record.get("time")):
            self._times.append((step, float(time)))

    def _curves(self) -> Curves:
        own = (Drawn(name, "mean of a batch, per episode", "", {key: name}) for key, name in self._own.items())
        panels = (
            Panel(
                title=panel.title,
                caption=panel.caption,
                unit=panel.unit,
                lines=tuple(
                    Line(label=label, points=thinned(self._points[name]), newest=self._points[name][-1])
                    for name, label in panel.lines.items()
                    if name in self._points
                ),
            )
            for panel in (*PANELS, *own)
        )
        error = f"{self._file.path}: {self._damaged} damaged lines were left out" if self._damaged else ""
        return Curves(
            error=error,
            panels=tuple(panel for panel in panels if panel.lines),
            times=(*self._times[:: per_point(len(self._times))], *self._times[-1:]),
            steps_per_point=per_point(max(map(len, self._points.values()), default=0)),
            staleness=self._staleness(),
        )

    def _staleness(self) -> Histogram | None:
        recent = max((self._points[name][-1][0] for name in STALENESS_BINS if self._points[name]), default=0.0)
        counts = [
            sum(value for step, value in self._points[name] if step > recent - RECENT_STEPS) for name in STALENESS_BINS
        ]
        if sum(counts) <= 0:
            return None
        used = max(behind for behind, count in enumerate(counts) if count) + 1
        labels = [str(behind) for behind in range(used)]
        if used == len(STALENESS_BINS):
            labels[-1] += "+"
        return Histogram(
            title="Staleness of trained groups",
            caption=f"share by batches behind, last {RECENT_STEPS} steps",
            bars=tuple((label, count / sum(counts)) for label, count in zip(labels, counts, strict=False)),
        )


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and -LARGEST <= value <= LARGEST


def per_point(num_points: int) -> int:
    return math.ceil(num_points / MAX_POINTS) or 1


def thinned(points: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The curve reduced to at most MAX_POINTS points, each the mean of neighbours."""
    size = per_point(len(points))
    parts = (points[start : start + size] for start in range(0, len(points), size))
    return tuple((fmean(step for step, _ in part), fmean(value for _, value in part)) for part in parts)
