"""The result of a study. It holds data only, so that JSON, PNG and page say the same."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from dvp_rl.contract.errors import ConfigError

DIGITS = 5
"""Significant digits in the JSON file."""

Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""JSON has no NaN; the file holds null."""


class Finding(NamedTuple):
    """A statement that the numbers decide."""

    statement: str
    holds: bool | None
    """None: nothing to decide, a figure to know."""
    figures: str


class Series(NamedTuple):
    """One line or set of points; `low` and `high` are an interval around `y`."""

    label: str
    x: tuple[Number, ...]
    y: tuple[Number, ...]
    low: tuple[Number, ...] = ()
    high: tuple[Number, ...] = ()
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

    def save(self, folder: Path) -> Path:
        """Writes NAME.json with rounded numbers; null stands for a number that is not finite. Returns its path."""
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
    """Numbers with DIGITS significant digits: short, and the same in the next run."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if hasattr(value, "_asdict"):
        return _rounded(value._asdict())
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, (list, tuple)) else value
