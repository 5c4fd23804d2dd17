"""SVG plots in the page's own colours, so that one drawing serves light and dark mode.

Matplotlib draws in placeholder colours, which are replaced by CSS variables.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from html import escape
from typing import Any

NUM_SERIES = 8
PLACEHOLDERS = {f"#00000{i}": f"var(--s{i})" for i in range(1, NUM_SERIES + 1)} | {
    "#000010": "var(--muted)",
    "#000011": "var(--line)",
}
MUTED, LINE = "#000010", "#000011"


def variable(series: int) -> str:
    """CSS variable of the colour of series 0, 1, ..."""
    return f"--s{series % NUM_SERIES + 1}"


def ink(series: int) -> str:
    """Placeholder of the colour of series 0, 1, ..."""
    return f"#00000{series % NUM_SERIES + 1}"


def svg(title: str, draw: Callable[[Any], None], size: tuple[float, float] = (5.0, 2.9)) -> str:
    """The SVG element drawn by `draw(axes)`, labelled for screen readers. The same drawing gives the same bytes."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": title,
        "font.size": 10.5,
        "xtick.labelsize": 10.5,
        "ytick.labelsize": 10.5,
        "font.family": "sans-serif",
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure.add_subplot())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _inline(buffer.getvalue(), title)


def _inline(text: str, label: str) -> str:
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"font: [^;\"]*sans-serif[^;\"]*", lambda m: m[0].split("'")[0] + "system-ui, sans-serif", text)
    for placeholder, name in PLACEHOLDERS.items():
        text = text.replace(placeholder, name)
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)


def dress(axes: Any, *, muted: str = MUTED, line: str = LINE) -> None:
    """Styles the axes: base line, horizontal grid, no frame."""
    axes.yaxis.get_offset_text().set_color(muted)
    axes.tick_params(which="both", color=line, labelcolor=muted, length=3)
    axes.grid(axis="y", color=line, lw=0.7)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(line)
