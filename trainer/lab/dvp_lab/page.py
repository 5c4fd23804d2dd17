"""Draws a study as PNG and HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any

from dvp_trainer.report import drawing
from dvp_trainer.report.drawing import LINE, MUTED, NUM_SERIES, dress, ink, svg, variable

from .study import Chart, Series, Study, Table, short

TEMPLATE = "page.html.j2"
PAPER = ("#1f5fbf", "#c2410c", "#0f766e", "#8b3fa8", "#8a6d00", "#5c626b", "#b0246d", "#4d7c0f")
"""Series colours of the PNG: those of the page's light theme."""
PAPER_MUTED, PAPER_LINE = "#3a3f46", "#d0d4d9"
PANEL_SIZE = (5.0, 3.3)
PNG_PANEL_SIZE, PNG_COLUMNS, PNG_DPI = (5.6, 4.2), 2, 80
LETTERS = 45
"""Most letters of tick labels that fit below a chart side by side, if all are as long as the longest."""
PNG_LETTERS = 95
"""Letters of a caption's line."""
LONG = 20
"""Most letters of a row's label that a phone shows in one line."""
INKS = tuple(map(ink, range(NUM_SERIES)))


def write_page(study: Study, folder: Path) -> Path:
    """Writes NAME.png (all charts, if there are any) and NAME.html (self-contained, light and dark). Returns the page's
    path."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_png(study, folder / f"{study.name}.png")
    page = folder / f"{study.name}.html"
    page.write_text(_render(study), encoding="utf-8")
    return page


def _render(study: Study) -> str:
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([Path(file).parent for file in (__file__, drawing.__file__)]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    charts = [
        {
            "title": chart.title,
            "caption": chart.caption,
            # Our own drawing; its labels are escaped by matplotlib.
            "svg": Markup(svg(chart.title, partial(_draw, chart=chart), PANEL_SIZE)),
            "legend": [
                {"label": series.label, "colour": variable(_number(chart, i)), "kind": _kind(series.style)}
                for i, series in enumerate(chart.series)
                if series.label
            ],
        }
        for chart in study.charts
    ]
    page: str = environment.get_template(TEMPLATE).render(
        study=study, charts=charts, tables=map(_cells, study.tables), text=text
    )
    return page


def _cells(table: Table) -> dict[str, Any]:
    """The table as text; each cell with the class of its column. Columns of numbers are aligned to the right."""
    from markupsafe import Markup

    rows = [tuple(map(text, row)) for row in table.rows]
    columns = zip(*rows, strict=True) if rows else ((),) * len(table.columns)
    classes = [Markup(' class="number"') if all(map(_is_number, column)) else "" for column in columns]
    return {
        "title": table.title,
        "caption": table.caption,
        "columns": list(zip(table.columns, classes, strict=True)),
        "rows": [list(zip(row, classes, strict=True)) for row in rows],
        "is_long": any(len(row[0]) > LONG for row in rows),
    }


def _is_number(cell: str) -> bool:
    return cell[:1] in "–-0123456789"


def _kind(style: str) -> str:
    """The class of a legend's mark."""
    if "--" in style or ":" in style:
        return "dashed"
    return "line" if "-" in style else "points"


def text(value: Any) -> str:
    """The text of a table cell or of a setting."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return short(value)
    if isinstance(value, (list, tuple)):
        return f"{len(value)} entries, in the JSON file"
    return f"{value:,}" if isinstance(value, int) else str(value)


# --- drawing ----------------------------------------------------------------------------------------------------------


def _write_png(study: Study, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not study.charts:
        path.unlink(missing_ok=True)  # what may lie there shows another study
        return
    rows = -(-len(study.charts) // PNG_COLUMNS)
    width, height = PNG_PANEL_SIZE
    figure = Figure(figsize=(width * PNG_COLUMNS, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for place, chart in enumerate(study.charts, start=1):
        axes = figure.add_subplot(rows, PNG_COLUMNS, place)
        _draw(axes, chart, PAPER, PAPER_MUTED, PAPER_LINE)
        axes.set_title(chart.title, fontsize=11, loc="left", parse_math=False)
        axes.set_xlabel("\n".join((chart.x_label, *wrap(chart.caption, PNG_LETTERS))), fontsize=8)
        axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=PNG_DPI, metadata={"Software": None})


def _draw(axes: Any, chart: Chart, colours: Sequence[str] = INKS, muted: str = MUTED, line: str = LINE) -> None:
    """Draws a chart, in the page's placeholder colours unless others are given."""
    from matplotlib.ticker import MaxNLocator

    for i, series in enumerate(chart.series):
        _draw_series(axes, series, colours[_number(chart, i) % len(colours)])
    dress(axes, muted=muted, line=line)
    axes.set_xlabel(chart.x_label, color=muted)
    axes.set_ylabel(chart.y_label, color=muted)
    if chart.ticks:
        axes.set_xticks(range(len(chart.ticks)), chart.ticks)
        if max(map(len, chart.ticks)) * len(chart.ticks) > LETTERS:
            axes.tick_params(axis="x", rotation=40)
            for label in axes.get_xticklabels():
                label.set(ha="right", rotation_mode="anchor")
    elif all(float(x).is_integer() for series in chart.series for x in series.x):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if chart.x_log:
        axes.set_xscale("log")
    if chart.linear_within is not None:
        axes.set_yscale("symlog", linthresh=chart.linear_within)
        axes.axhline(0, color=muted, lw=0.8)
    elif chart.y_log:
        _use_logs(axes)


def _use_logs(axes: Any) -> None:
    """Makes the vertical axis logarithmic. At most seven powers of ten have labels. If the axis spans more than half a
    decade, only 2 and 5 times these may have labels, too."""
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log")
    axes.yaxis.get_major_locator().set_params(numticks=7)
    low, high = axes.get_ylim()
    if high > low * math.sqrt(10):
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))


def _draw_series(axes: Any, series: Series, colour: str) -> None:
    if series.low and "-" in series.style and "o" not in series.style:
        axes.fill_between(series.x, series.low, series.high, color=colour, alpha=0.15, lw=0)
    elif series.low:
        below = [y - low for y, low in zip(series.y, series.low, strict=True)]
        above = [high - y for y, high in zip(series.y, series.high, strict=True)]
        axes.errorbar(series.x, series.y, (below, above), fmt="none", ecolor=colour, elinewidth=1.2, capsize=2.5)
    axes.plot(series.x, series.y, series.style, color=colour, label=series.label, lw=1.6, ms=4.5)


def _number(chart: Chart, index: int) -> int:
    colour = chart.series[index].colour
    return index if colour is None else colour
