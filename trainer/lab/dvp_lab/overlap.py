"""Overlap of an engine's and the trainer's safe sets, by rho and by entropy, and the cost of tokens outside of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from .engines import Engine
from .mismatch import SIGMAS, Estimate
from .rules import AXIS, NOTHING_PRUNED, Rule
from .sets import Outcome, Seen, Sets, joined, seen_of, sets_of
from .sources import CPU, Source, Trainer, device_setting, opened, traces
from .study import Chart, Finding, Series, Study, Table, percent, short
from .subject import Progress, Subject

RULES = tuple(Rule(-float(nats)) for nats in (2, 3, 4, 6, 8, 10, 13))
ENTROPIES = (0.0, 0.5, 1.5, 3.0, math.inf)
"""Edges of the bins of the trainer's full entropy, in nats."""
BINS = tuple(f"H {low:g}–{high:g}" if high < math.inf else f"H > {low:g}" for low, high in pairwise(ENTROPIES))

MANY = 0.1
"""Share of tokens outside from which on it is told in percent, not as one token in so many."""


class Row(NamedTuple):
    """The results of one engine at one rho."""

    rule: Rule
    sets: Sets
    outcome: Outcome
    num_sequences: int

    def bin(self, number: int) -> torch.Tensor:
        H = self.sets.entropy
        return (ENTROPIES[number] <= H) & (ENTROPIES[number + 1] > H)

    @property
    def is_expected(self) -> bool:
        """Whether the observed veto rate is within 3 binomial standard errors plus one sequence of the expected one."""
        expected, n = self.sets.vetoed("outside"), self.num_sequences
        allowed = SIGMAS * math.sqrt(expected * (1 - expected) / n) + 1 / n
        return abs(self.outcome.veto_outside.value - expected) <= allowed


def overlap(
    subject: Subject,
    engines: Sequence[Engine],
    num_tokens: int,
    seed: int,
    progress: Progress,
    device: torch.device = CPU,
) -> Study:
    trainer, found = Trainer(subject.folder, device), dict[Engine, list[Row]]()
    for number, engine in enumerate(engines):
        progress(number * len(RULES), len(engines) * len(RULES), engine)
        with opened(engine, subject.folder, device) as source:
            rows = _rows(source, trainer, subject, num_tokens, seed)
            found[engine] = []
            for done, row in enumerate(rows, start=number * len(RULES) + 1):
                progress(done, len(engines) * len(RULES), f"{engine}, rho = {row.rule.label}")
                found[engine].append(row)
    settings: dict[str, object] = {
        "model": subject.words,
        **device_setting(device),
        "sequences of each engine and rho": subject.num_prompts,
        "tokens of a sequence, at most": num_tokens,
        "seed": seed,
        "intervals": f"{SIGMAS:g} standard errors over sequences",
    }
    return describe(found, settings)


def _rows(source: Source, trainer: Trainer, subject: Subject, num_tokens: int, seed: int) -> Iterator[Row]:
    """One row per rule. If the engine returns no logits under pruning, its sets are those of text sampled unpruned."""
    unpruned = None
    for rule in RULES:
        sampled = list(traces(source, trainer, subject.prompts, rule, num_tokens, seed))
        seen: Seen = joined(seen_of(trace, rule) for trace in sampled)
        if sampled[0].samples.logits is None:
            sampled = unpruned = unpruned or list(
                traces(source, trainer, subject.prompts, NOTHING_PRUNED, num_tokens, seed)
            )
        yield Row(rule, joined(sets_of(trace, rule) for trace in sampled), seen.outcome(), subject.num_prompts)


def describe(found: Mapping[Engine, Sequence[Row]], settings: dict[str, object]) -> Study:
    return Study(
        name="overlap",
        title="What two safe sets have in common",
        abstract="At every position, the engine and the trainer each have a safe set, from their own logits. A token "
        "that the engine samples outside of the trainer's set costs the whole sequence. All figures but those called "
        "seen are exact sums over the vocabulary.",
        settings=settings,
        findings=tuple(_findings(found)),
        charts=(*_by_rho(found), *_by_entropy(*next(iter(found.items())))),
        tables=(*(_table(engine, rows) for engine, rows in found.items()), *_entropy_tables(found)),
        notes=(
            "SGLang returns no logits under pruning: its sets are those of text sampled unpruned, while its veto rate "
            "is seen on text sampled under pruning. At a large rho, the latter is more confident text, with fewer "
            "tokens near the threshold.",
            "Predicted: 0.56 s x (mass per nat within half a nat of the threshold), with the s of the position. An "
            "engine's noise is not independent from token to token, and s counts all tokens alike, however unlikely.",
            "Logits in bf16 often lie exactly on a threshold that is a multiple of their spacing, as most thresholds "
            "here are. The engine keeps them all, so that more is outside than predicted.",
        ),
        conclusion=conclusion(found),
    )


def conclusion(found: Mapping[Engine, Sequence[Row]]) -> tuple[str, ...]:
    """Sentences on the engine with the most tokens outside, at the smallest rho and at the largest."""

    def worst(place: int) -> str:
        at_rho = {engine: rows[place] for engine, rows in found.items()}
        engine = max(at_rho, key=lambda each: at_rho[each].sets.mean("outside").value)
        rule, sets = at_rho[engine].rule.label, at_rho[engine].sets
        if not (outside := sets.mean("outside").value):
            return f"rho = {rule}: there is no such token."
        often = f"one token in {1 / outside:,.0f} is such a token"
        if outside > MANY:
            often = f"{percent(outside)} of the tokens are such tokens"
        others = ", the worst of these engines" if len(found) > 1 else ""
        lost = percent(sets.vetoed("outside"))
        return f"rho = {rule}: with {engine}{others}, {often}, and {lost} of the sequences are thrown away."

    return (
        "The engine and the trainer each prune by their own numbers, so that they do not keep quite the same tokens. A "
        "sequence with a token that the engine kept and the trainer did not is thrown away.",
        worst(-1),
        worst(0),
        "The command dvp-lab rho weighs this cost against the mismatch that pruning removes.",
    )


def _findings(found: Mapping[Engine, Sequence[Row]]) -> Iterator[Finding]:
    exact = {engine: rows for engine, rows in found.items() if not engine.is_sglang}
    checks = [row.is_expected for rows in exact.values() for row in rows]
    if checks:
        statement = "At every rho, the veto rate seen agrees with the one expected from exact probabilities."
        yield Finding(statement, all(checks), f"{sum(checks)} of {len(checks)} engines and rhos")
    for engine, rows in found.items():
        for row in (rows[0], rows[-1]):
            yield Finding(
                f"{engine} at rho = {row.rule.label}: overlap, P(outside) per token, and sequences vetoed for it.",
                None,
                f"{row.sets.mean('overlap').value:.5f}; {short(row.sets.mean('outside').value, 2)}; expected "
                f"{percent(row.sets.vetoed('outside'))}, seen {percent(row.outcome.veto_outside.value)}",
            )


# --- tables -----------------------------------------------------------------------------------------------------------


def _table(engine: Engine, rows: Sequence[Row]) -> Table:
    def row(row: Row) -> tuple[object, ...]:
        sets, outcome = row.sets, row.outcome
        means = [sets.mean(name).value for name in ("overlap", "outside", "outside_predicted")]
        sides = [sets.mean(name).value for name in ("train_count", "infer_count", "train_mass", "infer_mass")]
        veto = (sets.vetoed("outside_predicted"), sets.vetoed("outside"), _percent(outcome.veto_outside))
        return (row.rule.label, *means, *sides, *veto, outcome.kept_weight.value)

    return Table(
        f"{engine} by rho",
        "Counts and masses: mean over positions, of the trainer's set and of the engine's. Veto: share of sequences "
        "with a token outside, predicted, expected from exact probabilities, seen. Kept weight: after veto and MIS.",
        (
            *("rho", "overlap", "P(outside)", "predicted"),
            *("count, train", "engine", "mass, train", "engine "),
            *("veto predicted", "expected", "seen", "kept weight"),
        ),
        tuple(row(each) for each in rows),
    )


def _entropy_tables(found: Mapping[Engine, Sequence[Row]]) -> Iterator[Table]:
    for engine, rows in found.items():
        cells = []
        for row in rows:
            for number, label in enumerate(BINS):
                where = row.bin(number) & row.sets.mask
                if where.any():
                    names = ("overlap", "outside", "train_count", "infer_count", "train_mass", "infer_mass")
                    values = [row.sets.mean(name, where).value for name in names]
                    cells.append((row.rule.label, label, int(where.sum()), *values))
        yield Table(
            f"{engine} by rho and entropy",
            "H: the trainer's full entropy at the position, in nats.",
            (
                *("rho", "entropy", "positions", "overlap", "P(outside)"),
                *("count, train", "engine", "mass, train", "engine "),
            ),
            tuple(cells),
        )


def _percent(share: Estimate) -> str:
    return f"{share.value:.1%} ± {share.error:.1%}"


# --- charts -----------------------------------------------------------------------------------------------------------


def _by_rho(found: Mapping[Engine, Sequence[Row]]) -> Iterator[Chart]:
    def lines(
        *kinds: tuple[str, Callable[[Row], float | Estimate]],
    ) -> tuple[Series, ...]:
        return tuple(
            _series(engine if place == 0 else "", rows, value, style, colour)
            for colour, (engine, rows) in enumerate(found.items())
            for place, (style, value) in enumerate(kinds)
        )

    ticks = tuple(rule.nats for rule in RULES)
    yield Chart(
        "Tokens outside",
        "P(sampled not in V_S), exact; dashed: 0.56 s x mass per nat at the threshold.",
        AXIS,
        "probability per token",
        lines(
            ("o-", lambda row: row.sets.mean("outside")),
            ("--", lambda row: row.sets.mean("outside_predicted").value),
        ),
        ticks,
        y_log=True,
    )
    yield Chart(
        "Sequences vetoed",
        "Share with a token outside. Line: expected from exact sums; points: seen, with intervals; dashed: predicted.",
        AXIS,
        "share of sequences",
        lines(
            ("-", lambda row: row.sets.vetoed("outside")),
            ("o", lambda row: row.outcome.veto_outside),
            ("--", lambda row: row.sets.vetoed("outside_predicted")),
        ),
        ticks,
    )
    yield Chart(
        "Not in common",
        "1 − |V_S ∩ V'_S| / |V_S|, mean over positions.",
        AXIS,
        "share of the set",
        lines(("o-", lambda row: 1 - row.sets.mean("overlap").value)),
        ticks,
        y_log=True,
    )
    yield Chart(
        "Pruned mass",
        "1 − Z, mean over positions: the trainer's; dashed: the engine's.",
        AXIS,
        "probability pruned",
        lines(
            ("o-", lambda row: 1 - row.sets.mean("train_mass").value),
            ("--", lambda row: 1 - row.sets.mean("infer_mass").value),
        ),
        ticks,
        y_log=True,
    )


def _by_entropy(engine: Engine, rows: Sequence[Row]) -> Iterator[Chart]:
    quantities: tuple[tuple[str, str, str, Callable[[float], float]], ...] = (
        ("Tokens outside", "outside", "probability per token", lambda value: value),
        ("Not in common", "overlap", "share of the set", lambda value: 1 - value),
        ("Size of the set", "train_count", "tokens", lambda value: value),
        ("Pruned mass", "train_mass", "probability pruned", lambda value: 1 - value),
    )
    for title, name, label, shown in quantities:
        series = []
        for number, words in enumerate(BINS):
            points = [(i, row.sets.mean(name, row.bin(number)).value) for i, row in enumerate(rows)]
            known = [(float(i), shown(value)) for i, value in points if shown(value) > 0]
            if known:
                x, y = zip(*known, strict=True)
                series.append(Series(words, x, y, colour=number))
        ticks = tuple(row.rule.nats for row in rows)
        caption = "Mean over positions, by the trainer's entropy in nats."
        yield Chart(f"{title} by entropy, {engine}", caption, AXIS, label, tuple(series), ticks, y_log=True)


def _series(
    label: str, rows: Sequence[Row], value: Callable[[Row], float | Estimate], style: str, colour: int
) -> Series:
    x, found = tuple(map(float, range(len(rows)))), [value(row) for row in rows]
    y = tuple(each.value if isinstance(each, Estimate) else each for each in found)
    if style != "o":
        return Series(label, x, y, style=style, colour=colour)
    estimates = [each for each in found if isinstance(each, Estimate)]
    low, high = tuple(each.low for each in estimates), tuple(each.high for each in estimates)
    return Series(label, x, y, low, high, style, colour)
