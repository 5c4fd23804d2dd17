"""Draws a study as PNG and HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dvp_trainer.report import drawing
from dvp_trainer.report.drawing import LINE, MUTED, NUM_SERIES, dress, ink, svg, variable

from .study import Chart, Series, Study

TEMPLATE = "page.html.j2"
PAPER = ("#1f5fbf", "#c2410c", "#0f766e", "#8b3fa8", "#8a6d00", "#5c626b")
"""Series colours of the PNG: those of the page's light theme."""
PAPER_MUTED, PAPER_LINE = "#3a3f46", "#d0d4d9"
PANEL_SIZE = (5.6, 3.7)
PNG_COLUMNS, PNG_DPI = 2, 80
INKS = tuple(map(ink, range(NUM_SERIES)))


def write_page(study: Study, folder: Path) -> Path:
    """Writes NAME.png (all charts) and NAME.html (self-contained, light and dark). Returns the page's path."""
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
                {"label": s.label, "colour": variable(_number(chart, i)), "dashed": "--" in s.style or ":" in s.style}
                for i, s in enumerate(chart.series)
            ],
        }
        for chart in study.charts
    ]
    page: str = environment.get_template(TEMPLATE).render(study=study, charts=charts, text=text)
    return page


def text(value: Any) -> str:
    """The text of a table cell or of a setting."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


# --- drawing ----------------------------------------------------------------------------------------------------------


def _write_png(study: Study, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = -(-len(study.charts) // PNG_COLUMNS)
    figure = Figure(figsize=(PANEL_SIZE[0] * PNG_COLUMNS, (PANEL_SIZE[1] + 0.5) * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for place, chart in enumerate(study.charts, start=1):
        axes = figure.add_subplot(rows, PNG_COLUMNS, place)
        _draw(axes, chart, PAPER, PAPER_MUTED, PAPER_LINE)
        axes.set_title(chart.title, fontsize=11, loc="left")
        axes.legend(fontsize=8 if len(chart.series) <= 6 else 6, frameon=False)
    figure.savefig(path, dpi=PNG_DPI, metadata={"Software": None})


def _draw(axes: Any, chart: Chart, colours: Sequence[str] = INKS, muted: str = MUTED, line: str = LINE) -> None:
    """Draws a chart, in the page's placeholder colours unless others are given."""
    for i, series in enumerate(chart.series):
        _draw_series(axes, series, colours[_number(chart, i) % len(colours)])
    dress(axes, muted=muted, line=line)
    axes.set_xlabel(chart.x_label, color=muted)
    axes.set_ylabel(chart.y_label, color=muted)
    if chart.ticks:
        axes.set_xticks(range(len(chart.ticks)), chart.ticks, rotation=30, ha="right")
    if chart.x_log:
        axes.set_xscale("log")
    if chart.linear_within is not None:
        axes.set_yscale("symlog", linthresh=chart.linear_within)
        axes.axhline(0, color=muted, lw=0.8)
    elif chart.y_log:
        axes.set_yscale("log")


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
