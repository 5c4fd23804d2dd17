"""The HTML report of a run: one file without links, light and dark, readable on a phone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dvp_rl.contract.completions import COMPLETIONS, PRUNED, Completion, completion_lines, read_completions
from dvp_rl.contract.metrics import DRIFTED, FORKS, TOOL_CALLS, TOOL_ERRORS, TURNS, mean_of, own_metrics
from dvp_trainer.disk import write_private

from .drawing import MUTED, dress, ink, svg, variable
from .sinks import read_metrics
from .starts import SETTINGS, Start, read_starts

TEMPLATE = "report.html.j2"


OF_ENVIRONMENT = "of the environment"
"""Label of the number of a completion's tokens that its model did not draw."""
ORIGIN = ("code", "software", "machine")
"""Fields of a Start that the page lists."""


class Kind(StrEnum):
    LINES = "lines"
    STACKED = "stacked"


class Curve(NamedTuple):
    key: str
    label: str
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    """Label of the vertical axis."""
    caption: str
    curves: tuple[Curve, ...]
    kind: Kind = Kind.LINES
    from_zero: bool = True
    """The vertical axis starts at 0; otherwise it shows the range of the values."""


PANELS = (
    Panel(
        "Reward",
        "reward",
        "Thin: mean over the batch. Bold: its moving average. Held-out: prompts of data.heldout.",
        (Curve("reward/mean", "training"), Curve("heldout/score", "held-out")),
        from_zero=False,
    ),
    Panel(
        "Mismatch: KL(infer ‖ train) per token",
        "nats per token",
        "Two estimates over tokens inside the safe set, before anything is rejected, and the first estimate for the "
        "policies without pruning, over the same tokens.",
        (
            Curve("mismatch/kl", "mean(−l)"),
            Curve("mismatch/k3_kl", "K3", dashed=True),
            Curve("mismatch/kl_unmasked", "without pruning"),
        ),
        from_zero=False,
    ),
    Panel(
        "Skew: mean of −(r − 1) A",
        "mean of −(r − 1) A",
        "Mismatch that depends on the advantage's sign, which no KL estimate detects. Zero for pure noise.",
        (
            Curve("mismatch/skew", "all tokens"),
            Curve("mismatch/skew_positive", "A > 0"),
            Curve("mismatch/skew_negative", "A < 0"),
        ),
        from_zero=False,
    ),
    Panel(
        "Sequences rejected",
        "share of sequences",
        "Share of the batch, by reason: sampled token outside the trainer's safe set, ratio below the veto, not a "
        "number, importance weight above its bound.",
        (
            Curve("veto/outside", "veto: outside"),
            Curve("veto/numerical", "veto: ratio"),
            Curve("veto/nan", "veto: NaN", dashed=True),
            Curve("mis/fraction", "MIS"),
        ),
    ),
    Panel(
        "Kept weight",
        "weight per sequence",
        "Mean importance weight per sequence after veto and MIS: the share of the trainer's own distribution that is "
        "learned from. The prediction uses KL and length. Values near 1 are healthy, 1/2 is not.",
        (Curve("mis/kept_weight", "measured"), Curve("mis/predicted_kept_weight_upper", "predicted", dashed=True)),
    ),
    Panel(
        "Kept mass",
        "probability",
        "Probability of the safe set under the full softmax: mean and smallest over all positions of the batch.",
        (
            Curve("kept/mass_mean_train", "trainer, mean"),
            Curve("kept/mass_mean_infer", "replica, mean", dashed=True),
            Curve("kept/mass_min_train", "trainer, min"),
            Curve("kept/mass_min_infer", "replica, min", dashed=True),
        ),
        from_zero=False,
    ),
    Panel(
        "Positions pruned",
        "share of positions",
        "Share of positions at which min-p removes at least a thousandth of the probability.",
        (Curve("pruned/share", "share"),),
    ),
    Panel(
        "Log-probs with and without pruning",
        "nats per token",
        "Mean over the sampled tokens inside both safe sets. The gap between a side's two curves is the effect of "
        "pruning; the gap between the sides is the mismatch.",
        (
            Curve("logprob/train_constrained", "trainer, constrained"),
            Curve("logprob/infer_constrained", "replica, constrained", dashed=True),
            Curve("logprob/train_full", "trainer, full"),
            Curve("logprob/infer_full", "replica, full", dashed=True),
        ),
        from_zero=False,
    ),
    Panel(
        "Bounds on the bias",
        "reward",
        "Bounds on how far pruning can move the expected reward: (max R − min R) E[Σ (1 − Z)], and "
        "R_max T (1 − Z_min) from Prop. 5.5.",
        (Curve("bias/bound_measured", "measured"), Curve("bias/bound", "Prop. 5.5", dashed=True)),
    ),
    Panel(
        "Tokens per episode",
        "tokens",
        "Mean of the batch: tokens that the model drew, and those that it only read, of tools and users.",
        (Curve("length/mean", "drawn"), Curve("length/environment_mean", "environment")),
    ),
    Panel(
        "Staleness",
        "batches",
        "Batches that changed the weights between drawing a sample's oldest token and training on it.",
        (Curve("staleness/mean", "mean"), Curve("staleness/max", "max", dashed=True)),
    ),
    Panel(
        "Throughput",
        "samples per second",
        "Samples trained per second of wall clock.",
        (Curve("throughput/samples_per_second", "samples/s"),),
    ),
    Panel(
        "Trainer time",
        "seconds per step",
        "Seconds per step. The trainer waits for samples and their rewards.",
        (
            Curve("time/wait_s", "wait"),
            Curve("time/train_s", "train"),
            Curve("time/publish_s", "publish"),
            Curve("time/eval_s", "evaluate"),
        ),
        Kind.STACKED,
    ),
    Panel(
        "Time outside the trainer",
        "seconds",
        "Seconds that a replica takes per group, and seconds of all reward workers per batch.",
        (Curve("time/generate_s", "generate a group"), Curve("time/reward_s", "reward a batch")),
    ),
    Panel(
        "Idle",
        "share of the time",
        "Share of the time in which each side is idle; averages for replicas and reward workers.",
        tuple(Curve(f"idle/{side}", side) for side in ("generate", "reward", "train", "publish", "swap")),
    ),
)

PANELS_OF_EPISODES = (
    Panel(
        "Turns per episode",
        "number",
        "Mean of the batch, with the calls of tools and those that failed.",
        (
            Curve(mean_of(TURNS), "turns"),
            Curve(mean_of(TOOL_CALLS), "tool calls"),
            Curve(mean_of(TOOL_ERRORS), "tool errors"),
        ),
    ),
    Panel(
        "Rewritten histories",
        "number per episode",
        "Forks: earlier versions of a history that was rewritten. Drifted: turns whose history the chat template "
        "renders otherwise than it was drawn.",
        (Curve(mean_of(FORKS), "forks"), Curve(mean_of(DRIFTED), "drifted")),
    ),
)

TILES = {
    "reward_first": "reward, first steps",
    "reward_last": "reward, last steps",
    "heldout_last": "held-out score",
    "samples_per_second": "samples per second",
    "steps": "steps",
    "samples_trained": "samples trained",
    "versions_published": "versions published",
    "wall_s": "total seconds",
}
"""Summary keys shown as large tiles, if present, with their labels."""


class Table(NamedTuple):
    title: str
    rows: Sequence[Sequence[str | Sequence[str]]]
    """A row begins with its label; a cell is text, or a list of texts."""
    head: Sequence[str] = ()


class Line(NamedTuple):
    """A curve with its points from the metrics file; steps without a value are left out."""

    curve: Curve
    number: int
    """Index in the panel, which determines the colour."""
    steps: NDArray[np.float64]
    values: NDArray[np.float64]


def write_report(metrics_jsonl: Path, summary: Mapping[str, Any], out: Path, *, title: str = "Training run") -> None:
    """Writes the page to `out`, with the completions and the newest start that lie beside the metrics. Panels without
    data are listed as not recorded. Only the owner can read it: it holds prompts."""
    folder, records = metrics_jsonl.parent, read_metrics(metrics_jsonl)
    starts = read_starts(folder)
    drawn = [(panel, lines_of(panel, records)) for panel in panels_of(records)]
    shown = _completions(folder / COMPLETIONS)
    page = render(
        title=title,
        subtitle=_subtitle(records),
        tiles=[
            {"label": label, "value": _text(summary[key])}
            for key, label in TILES.items()
            if summary.get(key) is not None
        ],
        plots=[plot(panel, lines) for panel, lines in drawn if lines],
        pruned=[f"{100 * share:g} %" for share in PRUNED],
        completions=shown,
        environment=any(card["facts"][OF_ENVIRONMENT] for record in shown for card in record["cards"]),
        missing=[panel.title for panel, lines in drawn if not lines],
        tables=[
            Table("Final figures", [(in_words(key), figure(value)) for key, value in summary.items()]),
            *([Table("Origin", _origin(starts))] if starts else []),
        ],
        settings=(folder / SETTINGS).read_text() if (folder / SETTINGS).exists() else "",
    )
    write_private(out, page)


def render(**content: Any) -> str:
    """The page, in which `content` replaces what the template shows by default: nothing."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    nothing: dict[str, Any] = dict.fromkeys(
        ("tiles", "leading", "plots", "missing", "pruned", "completions", "environment", "tables", "settings"), ()
    )
    return environment.get_template(TEMPLATE).render(nothing | content)


def _completions(file: Path) -> list[dict[str, Any]]:
    """The first and the last record, ready for the template."""
    ends: list[tuple[int, bytes]] = []
    for record in completion_lines(file):
        ends = [*ends[:1], record]
    return [{"step": step, "cards": [_card(shown) for shown in read_completions(line)]} for step, line in ends]


def _card(completion: Completion) -> dict[str, Any]:
    facts = {
        "reward": _text(completion.reward),
        "advantage": _text(completion.advantage),
        "training": completion.fate,
        "weight": None if completion.weight is None else _text(completion.weight),
        "tokens": f"{completion.num_tokens}, {completion.finish_reason}",
        OF_ENVIRONMENT: str(completion.num_environment) if completion.num_environment else None,
        "forks": str(completion.num_forks) if completion.num_forks else None,
        "row": str(completion.row),
        "answer": completion.answer,
    }
    return {"prompt": completion.prompt, "pieces": list(completion.pieces()), "facts": facts}


def panels_of(records: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """PANELS; if a harness played, those of its episodes, and one for each metric that only it knows, of those that
    most steps have."""
    keys = [key for key, _ in Counter(key for record in records for key in record).most_common()]
    caption = "Counted by the harness, per episode; mean of the batch."
    own = [
        Panel(name, "per episode", caption, (Curve(key, name),), from_zero=False)
        for key, name in own_metrics(keys).items()
    ]
    return [*PANELS, *(PANELS_OF_EPISODES if mean_of(TURNS) in keys else ()), *own]


def lines_of(panel: Panel, records: Sequence[Mapping[str, Any]]) -> list[Line]:
    lines = []
    for number, curve in enumerate(panel.curves):
        points = [(r["step"], r[curve.key]) for r in records if isinstance(r.get(curve.key), (int, float))]
        if points:
            steps, values = np.array(points, np.float64).T
            lines.append(Line(curve, number, steps, values))
    return lines


def _subtitle(records: Sequence[Mapping[str, Any]]) -> str:
    if not records:
        return "No step was recorded."
    return f"Steps {records[0]['step']} to {records[-1]['step']}, one record each."


def plot(panel: Panel, lines: Sequence[Line]) -> dict[str, Any]:
    from markupsafe import Markup

    legend = [
        {"label": line.curve.label, "colour": variable(line.number), "dashed": line.curve.dashed} for line in lines
    ]
    ends = "; ".join(f"{line.curve.label} {_text(line.values[0])} → {_text(line.values[-1])}" for line in lines)
    drawing = Markup(_draw(panel, lines))  # our own drawing, without any user input
    return {"title": panel.title, "legend": legend, "svg": drawing, "caption": panel.caption, "ends": ends}


def _draw(panel: Panel, lines: Sequence[Line]) -> str:
    def draw(axes: Any) -> None:
        if panel.kind is Kind.STACKED:
            _draw_stacked(axes, lines)
        else:
            for line in lines:
                _draw_line(axes, line)
        _dress(axes, panel)

    return svg(panel.title, draw)


def _draw_line(axes: Any, line: Line) -> None:
    style = "--" if line.curve.dashed else "-"
    sparse = len(line.values) <= 12
    noisy = line.curve.key == "reward/mean" and not sparse
    width, alpha = (0.9, 0.45) if noisy else (1.8, 1.0)
    axes.plot(
        line.steps,
        line.values,
        style,
        color=ink(line.number),
        lw=width,
        alpha=alpha,
        marker="o" if sparse else None,
        ms=4,
    )
    if noisy:
        axes.plot(line.steps, moving_average(line.values), style, color=ink(line.number), lw=2.2)


def _draw_stacked(axes: Any, lines: Sequence[Line]) -> None:
    steps = np.unique(np.concatenate([line.steps for line in lines]))
    layers = np.zeros((len(lines), len(steps)))
    for layer, line in zip(layers, lines, strict=True):
        layer[np.searchsorted(steps, line.steps)] = line.values
    bottom = np.zeros(len(steps))
    for layer, line in zip(layers, lines, strict=True):
        axes.fill_between(steps, bottom, bottom + layer, step="mid", color=ink(line.number), lw=0)
        bottom = bottom + layer


def _dress(axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4), useMathText=False)
    axes.set_xlabel("step", color=MUTED)
    axes.set_ylabel(panel.unit, color=MUTED)
    dress(axes)
    if axes.get_xlim()[1] - axes.get_xlim()[0] < 1:  # a single step: no ticks at fractions
        axes.set_xlim(axes.dataLim.x0 - 1, axes.dataLim.x0 + 1)
    low, high = axes.get_ylim()
    if high - low < 1e-9:  # a flat line: no axis offset of 1e-12
        axes.set_ylim(low - 0.5, high + 0.5)
    if panel.from_zero:
        axes.set_ylim(bottom=0)


def moving_average(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Centred moving average over about a tenth of the run (at least 5 steps), over fewer steps at the ends."""
    half = max(len(values) // 20, 2)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    start, end = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    averages: NDArray[np.float64] = (sums[end] - sums[start]) / (end - start)
    return averages


def in_words(key: str) -> str:
    return key.replace("_", " ").replace("/", ": ")


def _origin(starts: Sequence[Start]) -> list[tuple[str, str | list[str]]]:
    newest = starts[-1]
    return [
        ("started", [f"{start.at}, at step {start.step}" for start in starts]),
        ("model", [str(newest.settings["model"]["path"]), f"digest {newest.model}"]),
        ("working directory", newest.folder),
        *((name, [f"{key} {value}" for key, value in getattr(newest, name).items()]) for name in ORIGIN),
    ]


def figure(value: Any) -> str | list[str]:
    """The value as text, or a list of texts for a list."""
    return [_text(item) for item in value] if isinstance(value, (list, tuple)) and value else _text(value)


def _text(value: Any) -> str:
    if value is None or (isinstance(value, (list, tuple)) and not value):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.3g}" if value else "0"
    if isinstance(value, Mapping):
        return ", ".join(f"{in_words(str(key))} {_text(item)}" for key, item in value.items())
    return str(value)
