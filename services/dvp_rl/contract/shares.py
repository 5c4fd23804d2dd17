"""How callers share what is limited. Nobody takes more than they leave free: one alone gets half, two who compete get a
third each, and somebody new comes in as long as anything is free.

Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998, with alpha = 1.
"""

from __future__ import annotations

EVERYBODY = ""
"""In the place of a caller's name: one who has no limits but those of all callers together."""
RULE = "nobody takes more than they leave free"


def fits(caller: str, own: float, more: float, free: float) -> bool:
    """Whether a caller who has `own` may take `more` of what is `free`. Who has nothing may take one, even the last."""
    return more <= free and (caller == EVERYBODY or own + more <= max(free - more, 1))
