"""Writes the results as tables into a README.md beside the JSON files, each of which has the name of its benchmark.

python -m tests.benchmarks.tables
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGES = {
    RESULTS: "the last run of each benchmark, on a machine with two cores and no GPU ([with one](gpu)).",
    RESULTS / "gpu": "the last run of each benchmark on a GPU, whose name they hold.",
}
"""Folders of results, and what they are."""
MODULES = {"trl": "against_trl"}
"""Modules of results with another name."""
WIDE = 9
"""A table with more columns is transposed if that makes it narrower."""

Row = dict[str, str]


def page(folder: Path) -> str:
    parts = [
        "# What the benchmarks showed",
        f"Written by `python -m tests.benchmarks.tables` from the JSON files beside it: {PAGES[folder]} The docstrings "
        "of the modules in `tests/benchmarks` say what is measured and what the names mean.",
    ]
    for file in sorted(folder.glob("*.json")):
        name = file.name.split(".")[0]
        module = MODULES.get(name, name)
        about = (ast.get_docstring(ast.parse((HERE / f"{module}.py").read_text())) or "").split("\n\n")[0]
        parts += [f"## {file.stem}", " ".join(about.split())]
        parts += render(json.loads(file.read_text()))
    return "\n\n".join(parts) + "\n"


def render(results: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Paragraphs: first the single values, then the tables by name."""
    single = {key: value for key, value in results.items() if not _nested(value)}
    if single:
        yield _facts(path, {key: _cell(value) for key, value in single.items()})
    alike = {key: value for key, value in results.items() if _is_row(value)}
    if len(alike) > 1 and all(value.keys() >= min(alike.values(), key=len).keys() for value in alike.values()):
        yield from _table(path, [{"": key} | _flat(value) for key, value in alike.items()])
    else:
        alike = {}
    for key, value in results.items():
        name = f"{path} {key}".strip()
        if isinstance(value, list) and _nested(value):
            yield from _table(name, [_flat(row) for row in value])
        elif isinstance(value, dict) and key not in alike:
            yield from render(value, name)


def _nested(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict) for item in value))


def _is_row(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict) and any(not _nested(inner) for inner in value.values())


def _flat(row: Mapping[str, Any], path: str = "") -> Row:
    cells: Row = {}
    for key, value in row.items():
        name = f"{path} {key}".strip()
        cells |= _flat(value, name) if isinstance(value, dict) else {name: _cell(value)}
    return cells


def _table(name: str, rows: list[Row]) -> Iterator[str]:
    """A table, preceded by the values that are the same in all rows."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    same = [column for column in columns if len(rows) > 1 and len({row.get(column) for row in rows}) == 1]
    if name or same:
        yield _facts(name, {column: rows[0][column] for column in same})
    columns = [column for column in columns if column not in same]
    lines = [columns, *([row.get(column, "") for column in columns] for row in rows)]
    if len(columns) > WIDE and len(rows) < len(columns):
        lines = [list(line) for line in zip(*lines, strict=True)]
    head, *body = lines
    yield "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *body))


def _facts(name: str, cells: Row) -> str:
    facts = ", ".join(f"{key} {value}" for key, value in cells.items())
    return f"**{name}** {facts}".strip() if name else facts


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, bool) or not isinstance(value, int):
        return "" if value is None else str(value)
    return f"{value:,}"


if __name__ == "__main__":
    for place in PAGES:
        (place / "README.md").write_text(page(place))
