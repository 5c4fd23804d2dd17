"""`dvp-train compare A B`: the settings in which runs differ, what they reached, and their curves on one chart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from dvp_trainer.disk import write_private

from .outcome import Outcome, outcome
from .page import Curve, Kind, Line, Panel, Table, figure, in_words, lines_of, panels_of, plot, render
from .sinks import read_metrics
from .starts import ABSENT, Start, as_text, flat, over_time, starts_of_run, that_trained

OWN = {"run_id", "out_dir"}
"""Settings in which all runs differ."""


class RecordedRun(NamedTuple):
    name: str
    starts: list[Start]
    """Those that trained it."""
    metrics: list[dict[str, Any]]
    reached: Outcome


def read_runs(folders: Sequence[Path]) -> list[RecordedRun]:
    """The runs of these out_dirs, by run id, or by folder where two have one id. Raises ConfigError for a folder that
    holds no run."""
    starts = [starts_of_run(folder) for folder in folders]
    ids = [of_run[-1].run_id for of_run in starts]
    runs = []
    for folder, of_run, run_id in zip(folders, starts, ids, strict=True):
        metrics = read_metrics(folder / "metrics.jsonl")
        name, reached = run_id if ids.count(run_id) == 1 else str(folder), outcome(metrics)
        runs.append(RecordedRun(name, that_trained(of_run, reached.steps), metrics, reached))
    return runs


def comparison(runs: Sequence[RecordedRun]) -> list[Table]:
    """What differs between the runs, and their figures; a column per run."""
    made_from = [dict(over_time(run.starts, _made_from)) for run in runs]
    names = dict.fromkeys(name for each in made_from for name in each if name not in OWN)
    rows = [(name, *(each.get(name, ABSENT) for each in made_from)) for name in names]
    figures = [{key: figure(value) for key, value in asdict(run.reached).items()} for run in runs]
    head = ("", *(run.name for run in runs))
    return [
        Table("Differences", [row for row in rows if len(set(row[1:])) > 1] or [("none", *("" for _ in runs))], head),
        Table("Figures", [(in_words(key), *(of[key] for of in figures)) for key in figures[0]], head),
    ]


def write_comparison(runs: Sequence[RecordedRun], tables: Sequence[Table], out: Path) -> None:
    """Writes the page with the tables, and a chart for each metric with a curve per run. Raises ConfigError (disk
    full)."""
    drawn = [(panel, lines) for panel in _panels(runs) if (lines := list(_of_runs(panel, runs)))]
    page = render(
        title=" and ".join(run.name for run in runs),
        subtitle=f"{len(runs)} runs, by step.",
        plots=[plot(panel, lines) for panel, lines in drawn],
        leading=tables,
    )
    write_private(out, page)


def _made_from(start: Start) -> Iterator[tuple[str, str]]:
    yield from ((name, as_text(value)) for name, value in flat(start.settings))
    yield "model's digest", start.model
    yield from flat({"code": start.code, "software": start.software, "machine": start.machine})


def _panels(runs: Sequence[RecordedRun]) -> Iterator[Panel]:
    """A panel per curve of the reports."""
    for panel in panels_of([record for run in runs for record in run.metrics]):
        for curve in panel.curves:
            title = panel.title if len(panel.curves) == 1 else f"{panel.title}, {curve.label}"
            yield replace(panel, title=title, caption="", curves=(curve,), kind=Kind.LINES)


def _of_runs(panel: Panel, runs: Sequence[RecordedRun]) -> Iterator[Line]:
    """The panel's only curve, for every run that recorded it."""
    (curve,) = panel.curves
    for number, run in enumerate(runs):
        for line in lines_of(replace(panel, curves=(Curve(curve.key, run.name),)), run.metrics):
            yield line._replace(number=number)


def to_text(table: Table) -> Iterator[str]:
    """The table as lines of aligned columns."""
    rows = [[str(cell) for cell in row] for row in (table.head, *table.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.head))]
    yield table.title
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
