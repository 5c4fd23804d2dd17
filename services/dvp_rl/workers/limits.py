"""Limits of a worker process."""

from __future__ import annotations

from typing import NamedTuple


class Limits(NamedTuple):
    """What a user's function may take."""

    timeout_s: float
    """Longest time of one piece of work, in seconds."""
    memory_mib: int
    """Memory of the process beyond what it holds after its imports, in MiB. Linux only."""
    section: str = ""
    """The part before the names of the two settings in messages, e.g. `reward.`."""

    @property
    def too_slow(self) -> str:
        return f"took longer than {self.section}timeout_s allows"

    @property
    def too_large(self) -> str:
        return f"needed more memory than {self.section}memory_mib allows"
