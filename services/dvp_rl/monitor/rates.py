"""Events per second, from counters."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

WINDOW_S = 30.0


class Rates:
    """Rates over the last WINDOW_S. A counter that fell means that the broker was wiped: counting starts over."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Mapping[str, int]]] = deque()

    def update(self, now: float, counters: Mapping[str, int]) -> dict[str, float]:
        """The rates at the time `now`, in seconds; {} at the first call."""
        if self._seen and any(counters.get(name, 0) < value for name, value in self._seen[-1][1].items()):
            self._seen.clear()
        self._seen.append((now, counters))
        while len(self._seen) > 2 and self._seen[1][0] <= now - WINDOW_S:
            self._seen.popleft()
        then, before = self._seen[0]
        if now <= then:
            return {}
        return {name: (value - before.get(name, 0)) / (now - then) for name, value in counters.items()}
