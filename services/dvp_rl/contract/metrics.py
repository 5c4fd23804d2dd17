"""Metrics of an episode: what was counted while it was played, besides its reward."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated

from pydantic import AfterValidator, Field

MAX_METRICS = 16
LARGEST = 1e15
"""A sum of many such numbers is finite."""
MEAN = "episodes/{}_mean"
"""What a trainer calls the mean of one over a batch."""
TURNS, FORKS, DRIFTED = "turns", "forks", "drifted"
COUNTED = (TURNS, FORKS, DRIFTED)
"""Those that every episode has, because the replica counts them."""
TOOL_CALLS, TOOL_ERRORS = "tool_calls", "tool_errors"
"""Those that dvp-harness counts, of episodes with tools."""
KNOWN = (TURNS, TOOL_CALLS, TOOL_ERRORS, FORKS, DRIFTED)
OWN = re.compile(MEAN.format("([a-z0-9_]+)"))


def _not_counted(given: dict[str, float]) -> dict[str, float]:
    if taken := [name for name in COUNTED if name in given]:
        raise ValueError(f"other names than {', '.join(taken)}, which the replica counts")
    return given


Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")]
Value = Annotated[float, Field(strict=True, ge=-LARGEST, le=LARGEST)]
Metrics = Annotated[dict[Name, Value], Field(max_length=MAX_METRICS), AfterValidator(_not_counted)]
"""What a harness may say: up to 16 finite numbers by name, e.g. {"tool_errors": 1}."""


def own_metrics(keys: Iterable[str]) -> dict[str, str]:
    """Names of the metrics that only this run's harness knows, by their key in a step's record."""
    found = {key: matched[1] for key in keys if (matched := OWN.fullmatch(key))}
    return {key: name for key, name in sorted(found.items()) if name not in KNOWN}
