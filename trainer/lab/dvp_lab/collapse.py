"""`dvp-lab collapse`: where mismatch makes training collapse, and which arms hold there.

Declared before the runs of the table that this makes:

    collapse    the mean reward of a run's last WINDOW steps is below that of its first WINDOW, and below half of that
                of the last WINDOW of the same run without mismatch
    map         one seed at every cell, three arms: naive, DVP + MIS, and naive without mismatch
    candidates  first the cells where naive alone collapses, then the others; in both groups by the lead of DVP + MIS
                over naive in last reward, largest first
    the cell    the candidate where naive alone collapses with the most of some further seeds; ties go to the largest
                mean lead
    table       all arms at that cell, with seeds not used before
    goal        naive collapses in at least 4 of 5 seeds, DVP + MIS in none

Naive alone collapses if DVP + MIS does not and the run without mismatch ends above its start. The lab's README says
what came before the declaration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from dvp_rl.dvp.options import Mode

from . import chain
from .cells import Outcome, run_cells
from .precision import Format
from .rules import Rule
from .study import Chart, Finding, Series, Study, Table, short
from .training import NOTHING_PRUNED, Mismatch, Run

LOG_MIN_P = -4.0
"""log rho. The paper's e^-13 would prune nothing here: none of 64 tokens is that unlikely."""
WARMUP_STEPS = 30
"""Steps over which the learning rate rises. Without them, Adam's first steps move the policy so far that nearly all
samples of a stale sampler are dropped and the rest mislead: in the pilot, DVP + MIS then collapsed as well."""
WINDOW = 20
COLLAPSED = 0.5
SHARE = "reward, without mismatch = 1"
GOAL_SHARE = 0.8
AVERAGED = ("mismatch/kl", "veto/total", "mis/fraction", "mis/kept_weight", "kept/mass_mean_infer", "grad/norm")


class Arm(NamedTuple):
    label: str
    correction: dict[str, Any]
    train_log_min_p: float = NOTHING_PRUNED
    infer_log_min_p: float = NOTHING_PRUNED
    has_mismatch: bool = True


UNCORRECTED = {"mode": Mode.UNIT, "veto": None}
NAIVE = Arm("naive", UNCORRECTED)
ROLLOUT_ONLY = Arm("min-p in rollout only", UNCORRECTED, NOTHING_PRUNED, LOG_MIN_P)
DVP_MIS = Arm("DVP + MIS", {"mode": Mode.MIS}, LOG_MIN_P, LOG_MIN_P)
NO_MISMATCH = Arm("no mismatch", UNCORRECTED, has_mismatch=False)
"""The control: naive without mismatch shows what learning rate and task do by themselves."""
UNPRUNED = (Arm("TIS", {"mode": Mode.TIS, "veto": None}), Arm("MIS", {"mode": Mode.MIS, "veto": None}))
PRUNED = (
    ROLLOUT_ONLY,
    Arm("DVP", UNCORRECTED, LOG_MIN_P, LOG_MIN_P),
    DVP_MIS,
)
ARMS = (NAIVE, *UNPRUNED, *PRUNED, NO_MISMATCH)
MAPPED = (NAIVE, DVP_MIS, NO_MISMATCH)


class Cell(NamedTuple):
    mismatch: Mismatch
    lr: float
    length: int = 32

    @property
    def label(self) -> str:
        m = self.mismatch
        formats = {"weights": m.weights, "KV": m.kv}
        sources = [f"{format.value} {what}" for what, format in formats.items() if format is not None]
        sources += [f"field {m.field:g}"] if m.field else []
        return f"{' + '.join(sources) or 'fp32'}, {m.staleness} steps old, lr {self.lr:g}, T {self.length}"


CELLS = (
    *(
        Cell(Mismatch(staleness=staleness, field=0.5), lr, length=16)
        for staleness, lr in product((8, 12, 16), (1.5e-3, 2e-3, 3e-3))
    ),
    *(
        Cell(Mismatch(staleness=staleness, field=1.0), lr, length=16)
        for staleness, lr in product((8, 12), (1.5e-3, 2e-3))
    ),
    *(Cell(Mismatch(staleness=staleness, field=0.5), 3e-3, length=8) for staleness in (8, 16)),
    # Fewer sources: staleness, staleness with int4 weights, the error field.
    Cell(Mismatch(staleness=12), 2e-3, length=16),
    Cell(Mismatch(staleness=12, weights=Format.INT4), 2e-3, length=16),
    Cell(Mismatch(field=0.5), 2e-3, length=16),
    # Cells of the earlier map.
    Cell(Mismatch(staleness=8, field=0.5), 1e-3),
    Cell(Mismatch(staleness=8, field=0.5), 1.5e-3),
    Cell(Mismatch(staleness=4, field=0.5), 2e-3),
    Cell(Mismatch(staleness=8), 1.5e-3),
    Cell(Mismatch(staleness=8, weights=Format.INT4), 1.5e-3),
    Cell(Mismatch(field=0.5), 1.5e-3),
)


@dataclass(frozen=True)
class Plan:
    cells: tuple[Cell, ...] = CELLS
    steps: int = 250
    map_seed: int = 26
    candidates: int = 5
    screen_seeds: tuple[int, ...] = (27, 28, 29, 30)
    seeds: tuple[int, ...] = (31, 32, 33, 34, 35)
    teaching_steps: int = 400
    jobs: int = 1

    def run(self, model: Path, cell: Cell, arm: Arm, seed: int) -> Run:
        return Run(
            model=model,
            seed=seed,
            steps=self.steps,
            length=cell.length,
            lr=cell.lr,
            warmup_steps=WARMUP_STEPS,
            mismatch=cell.mismatch if arm.has_mismatch else Mismatch(),
            train_log_min_p=arm.train_log_min_p,
            infer_log_min_p=arm.infer_log_min_p,
            correction=arm.correction,
        )


SMALL = Plan(cells=CELLS[:2], steps=WINDOW + 5, candidates=2, screen_seeds=(1,), seeds=(2, 3), teaching_steps=100)


class Fate(NamedTuple):
    """First, best and last mean reward of a run over WINDOW steps."""

    first: float
    best: float
    last: float

    @classmethod
    def of(cls, outcome: Outcome) -> Fate:
        steps = len(outcome.metrics["reward/mean"])
        means = [outcome.mean("reward/mean", end - WINDOW, end) for end in range(min(WINDOW, steps), steps + 1)]
        return cls(means[0], max(means), means[-1])

    def share(self, control: Fate) -> float:
        """The last reward as a share of the control's; NaN if that is 0."""
        return self.last / control.last if control.last else math.nan

    def collapsed(self, control: Fate) -> bool:
        return self.last < min(self.first, COLLAPSED * control.last)

    @property
    def lost_half(self) -> bool:
        """Whether the run ends below half of its own best: the former criterion."""
        return self.last < 0.5 * self.best


Made = Mapping[tuple[Cell, str, int], Outcome]
"""Outcomes by cell, arm label and seed."""


class Pair(NamedTuple):
    """The fates of the MAPPED arms at one cell with one seed."""

    cell: Cell
    naive: Fate
    dvp_mis: Fate
    no_mismatch: Fate

    @classmethod
    def of(cls, made: Made, cell: Cell, seed: int) -> Pair:
        return cls(cell, *(Fate.of(made[cell, arm.label, seed]) for arm in MAPPED))

    @property
    def shows_it(self) -> bool:
        control = self.no_mismatch
        learns = control.last > control.first
        return learns and self.naive.collapsed(control) and not self.dvp_mis.collapsed(control)

    @property
    def gap(self) -> float:
        return self.dvp_mis.last - self.naive.last


def candidates(mapped: Sequence[Pair], number: int) -> list[Pair]:
    """The candidates, best first, by the rule in the module's docstring."""
    return sorted(mapped, key=lambda pair: (pair.shows_it, pair.gap), reverse=True)[:number]


def choose(screened: Sequence[Sequence[Pair]]) -> int:
    """Index of the candidate that becomes the table's cell, by the same rule. Each has one pair per further seed."""
    merits = [(sum(pair.shows_it for pair in pairs), fmean(pair.gap for pair in pairs)) for pairs in screened]
    return merits.index(max(merits))


def collapse(folder: Path, plan: Plan, progress: Callable[[int, int, str], None]) -> Study:
    """Runs the study. `folder` keeps the warm-started model and every run, so that none is made twice."""
    model = folder / f"model-{plan.teaching_steps}"
    if not model.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        progress(0, 1, "warm-starting the model")
        chain.teach(model, plan.teaching_steps)

    def make(stage: str, cells: Sequence[Cell], arms: Sequence[Arm], seeds: Sequence[int]) -> Made:
        places = list(product(cells, arms, seeds))
        runs = {_name(*place): plan.run(model, *place) for place in places}
        found: dict[str, Outcome] = {}
        progress(0, len(runs), stage)
        # spawn, not fork: PyTorch's threads do not survive a fork.
        with ProcessPoolExecutor(plan.jobs, mp_context=get_context("spawn")) as pool:
            for name, outcome in run_cells(runs, folder / "runs", pool):
                found[name] = outcome
                progress(len(found), len(runs), f"{stage}, {name}")
        costs[stage] = sum(outcome.cpu_s for outcome in found.values())
        return {(cell, arm.label, seed): found[_name(cell, arm, seed)] for cell, arm, seed in places}

    costs: dict[str, float] = {}
    of_map = make("map", plan.cells, MAPPED, [plan.map_seed])
    mapped = [Pair.of(of_map, cell, plan.map_seed) for cell in plan.cells]
    cells = [pair.cell for pair in candidates(mapped, plan.candidates)]
    of_screen = make("candidates", cells, MAPPED, plan.screen_seeds)
    screened = [[Pair.of(of_screen, cell, seed) for seed in plan.screen_seeds] for cell in cells]
    cell = cells[choose(screened)]
    of_table = make("table", [cell], ARMS, plan.seeds)
    by_arm = {arm.label: [of_table[cell, arm.label, seed] for seed in plan.seeds] for arm in ARMS}
    return _study(plan, mapped, screened, cell, by_arm, costs)


def _name(cell: Cell, arm: Arm, seed: int) -> str:
    """The name of a run. Cells that differ only in mismatch share their runs without mismatch."""
    place = cell if arm.has_mismatch else cell._replace(mismatch=Mismatch())
    return f"{_slug(place.label)}-{_slug(arm.label)}-{seed}"


def _slug(label: str) -> str:
    return re.sub("[^a-z0-9]+", "-", label.lower())


# --- results ----------------------------------------------------------------------------------------------------------


def _study(
    plan: Plan,
    pairs: list[Pair],
    screened: list[list[Pair]],
    cell: Cell,
    by_arm: dict[str, list[Outcome]],
    costs: Mapping[str, float],
) -> Study:
    fates = {label: [Fate.of(outcome) for outcome in outcomes] for label, outcomes in by_arm.items()}
    controls = fates[NO_MISMATCH.label]
    collapsed = {label: sum(map(Fate.collapsed, found, controls)) for label, found in fates.items()}
    lost_half = {label: sum(fate.lost_half for fate in found) for label, found in fates.items()}
    seeds = len(plan.seeds)
    enough = math.ceil(GOAL_SHARE * seeds)
    showing = sum(pair.shows_it for pair in pairs)
    return Study(
        name="collapse",
        title="Does mismatch make training collapse, and what holds?",
        abstract=(
            "A small model learns by reinforcement to count on in steps; every token of a sequence can be wrong. The "
            "policy that samples differs from the one that is trained: its weights are older or of low precision, or "
            "its logits carry an error that is a fixed function of the context. Every run uses the trainer's own "
            f"step. A run has collapsed if the mean reward of its last {WINDOW} steps is below that of its first "
            f"{WINDOW}, and below {COLLAPSED:g} of what the same run without mismatch ends at."
        ),
        settings={
            "steps": plan.steps,
            "of these, the learning rate rises over": WARMUP_STEPS,
            "sequences per step": f"{Run.groups} prompts x {Run.n}",
            "rho": f"{Rule(LOG_MIN_P).label} (not e⁻¹³, which would prune nothing of {chain.VOCAB} tokens)",
            "seed of the map": plan.map_seed,
            "seeds of the candidates": ", ".join(map(str, plan.screen_seeds)),
            "seeds of the table": ", ".join(map(str, plan.seeds)),
            "the table's cell": cell.label,
            **{f"CPU seconds, {stage}": round(seconds) for stage, seconds in costs.items()},
            "map": [asdict(cell.mismatch) | {"lr": cell.lr, "length": cell.length} for cell in plan.cells],
        },
        findings=(
            Finding("cells of the map where naive alone collapses", None, f"{showing} of {len(pairs)}"),
            Finding(
                f"naive collapses in at least {enough} of {seeds} seeds",
                collapsed[NAIVE.label] >= enough,
                f"{collapsed[NAIVE.label]} of {seeds}",
            ),
            Finding(
                "collapsed by the former criterion, half of a run's best (the lab's README says when it was replaced)",
                None,
                f"naive {lost_half[NAIVE.label]} of {seeds}, DVP + MIS {lost_half[DVP_MIS.label]} of {seeds}",
            ),
            Finding(
                "DVP + MIS collapses in none", not collapsed[DVP_MIS.label], f"{collapsed[DVP_MIS.label]} of {seeds}"
            ),
            Finding(
                "without mismatch, all runs end above their start: the learning rate alone is not the cause",
                all(fate.last > fate.first for fate in controls),
                f"{sum(fate.last > fate.first for fate in controls)} of {seeds}",
            ),
        ),
        charts=(_map_chart(pairs), _seeds_chart(fates), *_courses(by_arm)),
        tables=(_arms_table(by_arm, fates), _map_table(pairs), _candidates_table(screened)),
        notes=(
            "One small model and one task: it shows that the mechanism exists and what acts on it, not how often a "
            "large model meets it.",
            "The mismatch is deliberate and far larger than that of a healthy engine.",
            "Rewards are those of the samples that each arm trains on, under its own sampling policy.",
            "Where arms prune, samples come from a pruned policy: their reward starts higher.",
            "Criterion and cells were chosen on known runs; trainer/lab/README.md tells the history.",
        ),
        conclusion=conclusion(
            seeds, collapsed, {label: fmean(fate.last for fate in found) for label, found in fates.items()}
        ),
    )


def conclusion(seeds: int, collapsed: Mapping[str, int], last: Mapping[str, float]) -> tuple[str, ...]:
    """Sentences on the table: in how many of the seeds an arm collapsed, and the mean reward that it ended with."""

    def fate(label: str) -> str:
        return f"{collapsed[label]} of {seeds} runs collapsed, mean reward at the end {short(last[label])}"

    return (
        f"Training that ignores this mismatch (naive): {fate(NAIVE.label)}; without the mismatch it is "
        f"{short(last[NO_MISMATCH.label])}.",
        f"Pruning on both sides, with token veto and masked importance sampling (DVP + MIS): {fate(DVP_MIS.label)}.",
        f"Pruning in the engine alone ({ROLLOUT_ONLY.label}): {fate(ROLLOUT_ONLY.label)}.",
        "The mismatch is deliberate and the model is small: this shows what can happen, not how often it does.",
    )


def _arms_table(by_arm: dict[str, list[Outcome]], fates: dict[str, list[Fate]]) -> Table:
    rows = []
    for label, outcomes in by_arm.items():
        found = fates[label]
        last = [fate.last for fate in found]
        rows.append(
            (
                label,
                f"{sum(map(Fate.collapsed, found, fates[NO_MISMATCH.label]))} of {len(found)}",
                f"{sum(fate.lost_half for fate in found)} of {len(found)}",
                fmean(outcome.mean("reward/mean", 0, 1) for outcome in outcomes),
                fmean(fate.best for fate in found),
                fmean(last),
                stdev(last) if len(last) > 1 else math.nan,
                min(last),
                *(fmean(outcome.mean(name) for outcome in outcomes) for name in AVERAGED),
            )
        )
    columns = (
        "arm",
        "collapsed",
        "lost half of its best",
        "first reward",
        "best",
        "last",
        "sd of last",
        "worst last",
        "KL(infer || train)",
    )
    return Table(
        "All arms at one cell",
        "Means over seeds; best and last are means over a window of a run's steps. KL per token, veto and MIS as "
        "shares of sequences, kept weight and kept mass: means over all steps.",
        (*columns, "vetoed", "over the bound", "kept weight", "kept mass", "gradient norm"),
        tuple(rows),
    )


def _map_table(pairs: list[Pair]) -> Table:
    sides = ("best", "last")
    return Table(
        "Map",
        "One seed. Rewards of the best and of the last window.",
        ("", "cell", *(f"{arm.label} {side}" for arm in MAPPED for side in sides), "naive alone collapsed"),
        tuple(
            (
                number,
                pair.cell.label,
                *(value for fate in pair[1:] for value in (fate.best, fate.last)),
                pair.shows_it,
            )
            for number, pair in enumerate(pairs, start=1)
        ),
    )


def _candidates_table(screened: list[list[Pair]]) -> Table:
    return Table(
        "Candidates",
        "The map's first cells with further seeds: last rewards, and in how many naive alone collapsed.",
        ("cell", *(f"{arm.label} last" for arm in MAPPED), "naive alone collapsed"),
        tuple(
            (
                pairs[0].cell.label,
                *(fmean(fate.last for fate in fates) for fates in list(zip(*pairs, strict=True))[1:]),
                f"{sum(pair.shows_it for pair in pairs)} of {len(pairs)}",
            )
            for pairs in screened
        ),
    )


def _map_chart(pairs: list[Pair]) -> Chart:
    x = tuple(map(float, range(1, len(pairs) + 1)))
    sides = dict(zip((arm.label for arm in MAPPED), zip(*(pair[1:] for pair in pairs), strict=True), strict=True))
    controls = sides[NO_MISMATCH.label]
    return Chart(
        title="Map: final reward",
        caption=f"A run below {COLLAPSED:g} and below its start has collapsed. One seed; cells as in the map's table.",
        x_label="cell",
        y_label=SHARE,
        series=(
            *(Series(label, x, tuple(map(Fate.share, fates, controls)), style="o") for label, fates in sides.items()),
            Series("collapse", (x[0], x[-1]), (COLLAPSED, COLLAPSED), style="--"),
        ),
    )


def _seeds_chart(fates: dict[str, list[Fate]]) -> Chart:
    x = tuple(float(i) for i, found in enumerate(fates.values()) for _ in found)
    shares = tuple(share for found in fates.values() for share in map(Fate.share, found, fates[NO_MISMATCH.label]))
    return Chart(
        title="Table: final reward",
        caption=f"One point per seed. A run below {COLLAPSED:g} and below its start has collapsed.",
        x_label="",
        y_label=SHARE,
        series=(
            Series("one seed", x, shares, style="o"),
            Series("collapse", (0.0, len(fates) - 1.0), (COLLAPSED, COLLAPSED), style="--"),
        ),
        ticks=tuple(fates),
    )


def _courses(by_arm: dict[str, list[Outcome]]) -> tuple[Chart, ...]:
    """Charts of reward and KL over the steps."""

    def chart(title: str, unit: str, name: str, arms: Sequence[Arm], *, log: bool = False) -> Chart:
        read = abs if log else float
        return Chart(
            title=title,
            caption=f"Means over windows of {WINDOW} steps and over seeds, with the lowest and the highest seed.",
            x_label="step",
            y_label=unit,
            series=tuple(_course(arm.label, by_arm[arm.label], name, read) for arm in arms),
            y_log=log,
        )

    return (
        chart("Reward, nothing pruned", "mean reward", "reward/mean", (NAIVE, *UNPRUNED, NO_MISMATCH)),
        chart("Reward, pruned", "mean reward", "reward/mean", (NAIVE, *PRUNED)),
        chart("Mismatch", "|KL| per token (nats)", "mismatch/kl", (NAIVE, *PRUNED), log=True),
    )


def _course(label: str, outcomes: list[Outcome], name: str, read: Callable[[float], float]) -> Series:
    starts = range(0, len(outcomes[0].metrics[name]), WINDOW)
    windows = [[read(outcome.mean(name, start, start + WINDOW)) for outcome in outcomes] for start in starts]
    return Series(
        label,
        tuple(start + WINDOW / 2 for start in starts),
        tuple(map(fmean, windows)),
        tuple(map(min, windows)),
        tuple(map(max, windows)),
        style="-",
    )
