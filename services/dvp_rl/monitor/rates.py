"""From counters to events per second."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

WINDOW_S = 30.0


class Rates:
    """Over the last WINDOW_S. A counter that fell belongs to a broker that was wiped: counting starts anew."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Mapping[str, int]]] = deque()

    def update(self, now: float, counters: Mapping[str, int]) -> dict[str, float]:
        """{} at first."""
        if self._seen and any(counters.get(name, 0) < value for name, value in self._seen[-1][1].items()):
            self._seen.clear()
        self._seen.append((now, counters))
        while len(self._seen) > 2 and self._seen[1][0] <= now - WINDOW_S:
            self._seen.popleft()
        then, before = self._seen[0]
        if now <= then:
            return {}
        return {name: (value - before.get(name, 0)) / (now - then) for name, value in counters.items()}
