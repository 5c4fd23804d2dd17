"""What a study hands over. Everything in it is data, so that JSON, PNG and page say the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Finding(NamedTuple):
    """A statement that the numbers decide."""

    statement: str
    holds: bool | None
    """None: nothing to decide, a figure to know."""
    figures: str


class Series(NamedTuple):
    """One line or set of points; `low` and `high` are an interval around `y`."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    style: str = "o-"
    """Matplotlib's: marker, line, or both."""
    colour: int | None = None
    """Number of its colour; None takes its place among the chart's series."""


@dataclass(frozen=True)
class Chart:
    title: str
    caption: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    ticks: tuple[str, ...] = ()
    """Names of x = 0, 1, ..; none: x is a number."""
    x_log: bool = False
    y_log: bool = False
    linear_within: float | None = None
    """A logarithmic vertical axis of both signs, linear between -this and +this."""


class Table(NamedTuple):
    title: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Study:
    name: str
    title: str
    abstract: str
    settings: dict[str, Any]
    findings: tuple[Finding, ...]
    charts: tuple[Chart, ...]
    tables: tuple[Table, ...]
    notes: tuple[str, ...] = field(default=())
    """What the numbers do not show."""
