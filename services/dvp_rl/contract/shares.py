"""How callers share a limited resource. Nobody takes more than they leave free: a single caller gets half, two that
compete get a third each, and a new caller is admitted as long as anything is free.

Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998, with alpha = 1.
"""

from __future__ import annotations

EVERYBODY = ""
"""Replaces the name of a caller that has no limits of its own, only those of all callers together."""
RULE = "nobody takes more than they leave free"


def fits(caller: str, own: float, more: float, free: float) -> bool:
    """Whether a caller that has `own` may take `more` of what is `free`. One that has nothing may take the last one."""
    return more <= free and (caller == EVERYBODY or own + more <= max(free - more, 1))
