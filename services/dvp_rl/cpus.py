"""The number of CPUs that this process can use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CONTROL_GROUPS, OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cpus() -> int:
    """CPUs that the process may run on, at most its container's CPU limit, rounded up. More threads than that would
    exhaust the limit together, and the kernel would stop all of them."""
    runs_on = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([runs_on, *map(math.ceil, quotas())]))


def quotas() -> Iterator[float]:
    """CPU limits of the process's control group (version 2) and of its ancestors; none if no limit is set."""
    with suppress(OSError):
        lines = OWN_GROUP.read_text().splitlines()
        own = CONTROL_GROUPS / next((line[len("0::/") :] for line in lines if line.startswith("0::/")), "")
        for group in (own, *own.parents):
            with suppress(OSError, ValueError):
                quota, period = map(int, (group / "cpu.max").read_text().split())
                yield quota / period
