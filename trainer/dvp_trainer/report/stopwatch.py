"""Where the time of a training step went."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean

from dvp_trainer.data.batch import Batch


class Stopwatch:
    """Where the time of an iteration went."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._parts: dict[str, float] = {}
        self._generated: dict[str, Coverage] = {}
        self._swaps_s: dict[str, float] = {}
        self._swaps_told = self._started
        self._swapping: float | None = None
        """Share of the time that replicas spent on swaps between the last two tellings."""

    def tell_swaps(self, swaps_s: dict[str, float]) -> None:
        """Seconds of swaps so far, by replica."""
        now = time.monotonic()
        elapsed, self._swaps_told = now - self._swaps_told, now
        before, self._swaps_s = self._swaps_s, swaps_s
        # One that is new, or has started anew, is counted from the next time on.
        spent = [swaps_s[name] - before[name] for name in swaps_s.keys() & before.keys()]
        spent = [seconds for seconds in spent if seconds >= 0]
        self._swapping = fmean(spent) / elapsed if spent else None

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self._parts[f"time/{part}_s"] = time.monotonic() - start

    def lap(self, batch: Batch, reward_workers: int) -> dict[str, float]:
        """The parts since the last lap, the rates, and who stood still for what share of the time."""
        now = time.monotonic()
        elapsed, self._started = now - self._started, now
        parts, self._parts = self._parts, {}
        busy = {
            "generate": self._generating(batch),
            "reward": sum(scored.reward_s for scored in batch.groups) / reward_workers,
            "train": parts["time/train_s"],
            "publish": parts.get("time/publish_s", 0.0),
        }
        shares = {side: seconds / elapsed for side, seconds in busy.items()}
        if self._swapping is not None:
            shares["swap"] = self._swapping
        idle = {f"idle/{side}": min(max(1 - share, 0.0), 1.0) for side, share in shares.items()}
        return (
            parts
            | idle
            | {
                "time/step_s": elapsed,
                "throughput/samples_per_second": batch.num_sequences / elapsed,
                "throughput/tokens_per_second": batch.num_tokens / elapsed,
            }
        )

    def _generating(self, batch: Batch) -> float:
        """Seconds in which a replica, on average, drew samples of the batch."""
        busy: defaultdict[str, float] = defaultdict(float)
        for scored in sorted(batch.groups, key=lambda scored: scored.arrived):
            covered = self._generated.setdefault(scored.group.replica_id, Coverage())
            busy[scored.group.replica_id] += covered.add(scored.arrived - scored.group.generate_s, scored.arrived)
        return sum(busy.values()) / len(busy)


class Coverage:
    """How much of a line intervals cover that come in the order of their ends."""

    def __init__(self) -> None:
        self._end = -math.inf

    def add(self, start: float, end: float) -> float:
        """The length that it adds: what lies before the end of another counts once."""
        start, self._end = max(start, self._end), max(end, self._end)
        return max(end - start, 0.0)
