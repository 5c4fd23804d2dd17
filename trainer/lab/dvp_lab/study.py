"""The result of a study: data only, so that JSON, PNG and page show the same."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from dvp_rl.contract.errors import ConfigError

LEAST = 1e-3
"""Smallest number that is written without a power of ten."""
DIGITS = 5
"""Significant digits in the JSON file."""

Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A float that is NaN where the file holds null; JSON has no NaN."""


def short(value: float, digits: int = 3, least: float = LEAST) -> str:
    """The number with some significant digits: 1,020, 29.8, 0.0696, and 6.58e-5 if it is below `least`; a dash if it is
    not finite."""
    if not math.isfinite(value):
        return "–"
    rounded = Decimal(f"{value + 0:.{digits}g}")  # without a zero's sign
    if rounded and not least <= abs(float(rounded)) < 1e6:
        return f"{rounded:e}".replace("e+", "e")
    return f"{rounded:,f}"


def percent(share: float) -> str:
    return f"{short(100 * share)}\N{NO-BREAK SPACE}%"


class Finding(NamedTuple):
    """A statement, and the figures that decide it."""

    statement: str
    holds: bool | None
    """None if there is nothing to decide and the finding only reports figures."""
    figures: str


class Series(NamedTuple):
    """One line or set of points; `low` and `high` are an interval around `y`."""

    label: str
    """Empty for a line that the chart's caption explains; it is not in the legend."""
    x: tuple[Number, ...]
    y: tuple[Number, ...]
    low: tuple[Number, ...] = ()
    high: tuple[Number, ...] = ()
    style: str = "o-"
    """Matplotlib's format: marker, line, or both."""
    colour: int | None = None
    """Index of its colour; None uses the series' position in the chart."""


@dataclass(frozen=True)
class Chart:
    title: str
    caption: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    ticks: tuple[str, ...] = ()
    """Labels of x = 0, 1, ..; empty if x is a number."""
    x_log: bool = False
    y_log: bool = False
    linear_within: float | None = None
    """If set, the vertical axis is logarithmic for both signs and linear between -linear_within and +linear_within."""


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
    conclusion: tuple[str, ...] = field(default=())
    """What follows, in a few sentences for a reader who knows neither the method nor its terms."""

    def save(self, folder: Path) -> Path:
        """Writes NAME.json with rounded numbers, and null for those that are not finite. Returns its path."""
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{self.name}.json"
        numbers = json.dumps(_rounded(asdict(self)), indent=1, ensure_ascii=False, allow_nan=False)
        file.write_text(numbers + "\n", encoding="utf-8")
        return file

    @classmethod
    def load(cls, file: Path) -> Study:
        """The study that `save` wrote. Raises ConfigError if the file is missing or holds something else."""
        try:
            return TypeAdapter(cls).validate_json(file.read_bytes())
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror or error}") from None
        except ValidationError as error:
            raise ConfigError(f"{file}: not the JSON of a study: {error.errors()[0]['msg']}") from None


def _rounded(value: Any) -> Any:
    """Rounds all numbers to DIGITS significant digits, which keeps the file short and equal from run to run."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if hasattr(value, "_asdict"):
        return _rounded(value._asdict())
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, (list, tuple)) else value
