"""Time spent in each part of a training step, and idle shares of each side."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean

from dvp_trainer.data.batch import Batch
from dvp_trainer.patience import patient


class Stopwatch:
    """Measures where the time of an iteration goes."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._parts: dict[str, float] = {}
        self._last: dict[str, float] = {}
        """Seconds that each part took the last time."""
        self._generated: dict[str, Coverage] = {}
        self._swaps_s: dict[str, float] = {}
        self._swaps_told = self._started
        self._swapping: float | None = None
        """Mean share of time that replicas spent on swaps between the last two calls of `tell_swaps`."""

    def tell_swaps(self, swaps_s: dict[str, float]) -> None:
        """Takes the seconds spent on swaps so far, by replica."""
        now = time.monotonic()
        elapsed, self._swaps_told = now - self._swaps_told, now
        before, self._swaps_s = self._swaps_s, swaps_s
        # A replica that is new or has restarted is counted from the next call on.
        spent = [swaps_s[name] - before[name] for name in swaps_s.keys() & before.keys()]
        spent = [seconds for seconds in spent if seconds >= 0]
        self._swapping = fmean(spent) / elapsed if spent else None

    @contextmanager
    def measure(self, part: str, what: str | Callable[[], str]) -> Iterator[None]:
        """Measures the block, and says `what` goes on if that takes much longer than the last time."""
        start = time.monotonic()
        with patient(what, usual_s=self._last.get(part, 0.0)):
            yield
        self._last[part] = self._parts[f"time/{part}_s"] = time.monotonic() - start

    def lap(self, batch: Batch, reward_workers: int) -> dict[str, float]:
        """Times of the parts since the last lap, throughput, and the idle share of each side."""
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
                "throughput/samples_per_second": batch.num_episodes / elapsed,
                "throughput/tokens_per_second": batch.num_model_tokens / elapsed,
            }
        )

    def _generating(self, batch: Batch) -> float:
        """Seconds that a replica, on average, spent on samples of the batch."""
        busy: defaultdict[str, float] = defaultdict(float)
        for scored in sorted(batch.groups, key=lambda scored: scored.arrived):
            covered = self._generated.setdefault(scored.group.replica_id, Coverage())
            busy[scored.group.replica_id] += covered.add(scored.arrived - scored.group.generate_s, scored.arrived)
        return sum(busy.values()) / len(busy)


class Coverage:
    """Total length of overlapping intervals, added in the order of their ends."""

    def __init__(self) -> None:
        self._end = -math.inf

    def add(self, start: float, end: float) -> float:
        """The length that this interval adds; any part before the latest end so far does not count again."""
        start, self._end = max(start, self._end), max(end, self._end)
        return max(end - start, 0.0)
