"""Metrics of an episode: what was counted while it was played, besides its reward."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice
from typing import Annotated

from pydantic import AfterValidator, Field

MAX_METRICS = 16
LARGEST = 1e15
"""A sum of many such numbers is finite."""
PREFIX = "episodes/"
TURNS, FORKS, DRIFTED = "turns", "forks", "drifted"
COUNTED = (TURNS, FORKS, DRIFTED)
"""Those that every episode has, because the replica counts them."""
TOOL_CALLS, TOOL_ERRORS = "tool_calls", "tool_errors"
"""Those that dvp-harness counts, of episodes with tools."""
KNOWN = (TURNS, TOOL_CALLS, TOOL_ERRORS, FORKS, DRIFTED)
NAME = "[a-z][a-z0-9_]{0,31}"


def _not_counted(given: dict[str, float]) -> dict[str, float]:
    if taken := [name for name in COUNTED if name in given]:
        raise ValueError(f"other names than {', '.join(taken)}, which the replica counts")
    return given


Name = Annotated[str, Field(pattern=f"^{NAME}$")]
Value = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=-LARGEST, le=LARGEST)]
Metrics = Annotated[dict[Name, Value], Field(max_length=MAX_METRICS), AfterValidator(_not_counted)]
"""What a harness may say: up to 16 finite numbers by name, e.g. {"tool_errors": 1}."""


def mean_of(name: str) -> str:
    """What a trainer's record calls the mean of a metric over a batch."""
    return f"{PREFIX}{name}_mean"


MEAN = re.compile(mean_of(f"({NAME})"))


def own_metrics(keys: Iterable[str]) -> dict[str, str]:
    """The first MAX_METRICS that only this run's harness knows, of the keys of steps' records: names by key."""
    means = filter(None, (MEAN.fullmatch(key) for key in keys if key.startswith(PREFIX)))
    found = {matched[0]: matched[1] for matched in means if matched[1] not in KNOWN}
    return dict(islice(found.items(), MAX_METRICS))
