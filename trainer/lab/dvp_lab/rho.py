"""Which rho: how much mismatch pruning removes, what it costs, and how much of a training batch is left."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from . import chain
from .budget import LENGTH, RATE, WINDOW, Budget, rewards
from .engines import Engine
from .mismatch import SIGMAS, Estimate
from .rules import NOTHING_PRUNED, Rule
from .sets import Outcome, Sets, joined, seen_of, sets_of
from .sources import Source, Trace, Trainer, opened, traces
from .study import Chart, Finding, Series, Study, Table
from .subject import Progress, Subject

FIXED = (*(Rule(-float(nats)) for nats in (2, 3, 4, 5, 6, 8, 10, 13, 16, 20)), NOTHING_PRUNED)
MATCHED = (Rule(-3.0), Rule(-5.0), Rule(-8.0))
"""Fixed rules. One rule by entropy per slope is made to prune as much as each of them."""
SLOPES = (0.5, -0.5)
"""Slopes of the rules by entropy. The first prunes less where the model is unsure, the second more."""
MAX_BIAS, MAX_VETO = 0.05, 0.05
"""Most that the proposal may cost: bias bound as a share of the rewards' range, and share of sequences vetoed."""
NOTICEABLE = 0.01
"""Smallest share of the mismatch whose removal counts as a reason."""


class Row(NamedTuple):
    """The results of one rule, on text sampled under it."""

    rule: Rule
    matched: Rule | None
    """The fixed rule that prunes as much as this rule by entropy; None for a fixed rule."""
    sets: Sets
    outcome: Outcome
    reward: Estimate | None = None
    """Reward after a fixed training budget under the rule."""

    @property
    def bias(self) -> Estimate:
        """Bound on the bias of the expected reward, in units of the rewards' range: E[sum_t (1 - Z_t)]."""
        return self.outcome.pruned

    @property
    def kl(self) -> float:
        return self.sets.mean("kl").value

    @property
    def removed(self) -> float:
        """Share of the KL per token that pruning removes, against the same positions without pruning."""
        return 1 - self.kl / self.sets.mean("kl_full").value


def rho(
    subject: Subject, engine: Engine, num_tokens: int, seed: int, budget: Budget | None, progress: Progress
) -> Study:
    """Compares all rules and proposes a fixed one. Without a budget, nothing is trained."""
    trainer = Trainer(subject.folder)
    with opened(engine, subject.folder) as source:
        rows = list(_rows(source, trainer, subject, num_tokens, seed, progress))
    if budget is not None:
        found = rewards([row.rule for row in rows], budget, progress)
        rows = [row._replace(reward=found[row.rule]) for row in rows]
    settings: dict[str, object] = {
        "model": subject.words,
        "engine": str(engine),
        "sequences of each rule": subject.num_prompts,
        "tokens of a sequence, at most": num_tokens,
        "seed": seed,
        "intervals": f"{SIGMAS:g} standard errors over sequences; of the reward, over seeds",
    }
    if budget is not None:
        settings["training under each rule"] = (
            f"{budget.steps} steps at learning rate {RATE:g} on the lab's task (chain.py), {LENGTH} tokens, vocabulary "
            f"{chain.VOCAB}, rollout with fp8 weights and KV, seeds {', '.join(map(str, budget.seeds))}; reward: mean "
            f"of the last {WINDOW} steps"
        )
    return describe(rows, settings)


def _rows(
    source: Source, trainer: Trainer, subject: Subject, num_tokens: int, seed: int, progress: Progress
) -> Iterator[Row]:
    def sampled(rule: Rule) -> list[Trace]:
        return list(traces(source, trainer, subject.prompts, rule, num_tokens, seed))

    unpruned = sampled(NOTHING_PRUNED)
    adaptive = [(matching(unpruned, fixed, slope), fixed) for fixed in MATCHED for slope in SLOPES]
    rules = [*((rule, None) for rule in FIXED), *adaptive]
    for done, (rule, matched) in enumerate(rules):
        progress(done, len(rules), f"{source.name}, rho = {rule.label}")
        found = sampled(rule)
        seen = joined(seen_of(trace, rule) for trace in found)
        yield Row(rule, matched, joined(sets_of(trace, rule) for trace in found), seen.outcome())


def matching(unpruned: Sequence[Trace], fixed: Rule, slope: float) -> Rule:
    """The rule with this slope that prunes as much of the trainer's probability as `fixed` does on the same text."""
    positions = torch.cat([trace.train_logits[trace.samples.mask] for trace in unpruned])[::4].double()

    def pruned(rule: Rule) -> float:
        distance = positions - positions.amax(-1, keepdim=True)
        threshold = torch.as_tensor(rule(positions), dtype=torch.float64).expand(len(positions))[:, None]
        return float((positions.softmax(-1) * (distance < threshold)).sum(-1).mean())

    wanted, low, high = pruned(fixed), -60.0, 20.0
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (low, middle) if pruned(Rule(middle, slope)) > wanted else (middle, high)
    return Rule(round(low, 3), slope)


def propose(rows: Sequence[Row]) -> Row:
    """The fixed rule that removes the most mismatch, with at most MAX_BIAS and MAX_VETO. If no rule is within these
    limits, the one with the smallest bias bound."""
    fixed = [row for row in rows if row.matched is None]
    allowed = [row for row in fixed if row.bias.value <= MAX_BIAS and row.outcome.veto.value <= MAX_VETO]
    if not allowed:
        return min(fixed, key=lambda row: row.bias.value)
    return max(allowed, key=lambda row: row.removed)


# --- the page ---------------------------------------------------------------------------------------------------------


def describe(rows: Sequence[Row], settings: dict[str, object]) -> Study:
    return Study(
        name="rho",
        title="Which rho",
        abstract="Every rule is measured on text that the engine sampled under it: how much mismatch it removes, how "
        "far it can move the expected reward, and how many sequences veto and importance weights leave.",
        settings=settings,
        findings=(_proposal(rows), *_comparisons(rows)),
        charts=tuple(_charts(rows)),
        tables=(_table(rows),),
        notes=(
            "The bounds grow with the length of the sequences: longer ones need a smaller rho.",
            "Bias bound: (max R - min R) E[sum_t (1 - Z_t)] with rewards in [0, 1]; above 1 it is vacuous. It bounds "
            "how far J_mp is from J for any reward; training under J_mp can do better or worse.",
            "KL is per token, exact, over tokens that both sides keep, against the same positions without pruning.",
            "The reward is that of another, smaller model, whose samples were also drawn under the rule: a large rho "
            "gains there in part because it forbids slips from the first step on. Rules by entropy are made to prune "
            "as much as fixed ones on the text of the model above, not on that task.",
        ),
    )


def _proposal(rows: Sequence[Row]) -> Finding:
    best = propose(rows)
    limits = f"a bias bound up to {MAX_BIAS:g} of the rewards' range and up to {MAX_VETO:.0%} of sequences vetoed"
    reason = f"it removes the most mismatch with {limits}"
    if best.removed < NOTICEABLE:
        reason = (
            f"with {limits}, no rho removes {NOTICEABLE:.0%} of the mismatch; this one guards the tail within these "
            "limits"
        )
    return Finding(
        f"Proposed: rho = {best.rule.label}. Reason: {reason}.",
        None,
        f"{best.removed:.1%} of the KL removed; bias bound {best.bias}; {best.outcome.veto.value:.1%} vetoed, "
        f"{best.outcome.mis.value:.1%} masked, kept weight {best.outcome.kept_weight.value:.3f}",
    )


def _comparisons(rows: Sequence[Row]) -> Iterator[Finding]:
    """Compares each rule by entropy with the fixed rule that prunes as much."""
    fixed = {row.rule: row for row in rows if row.matched is None}
    for row in rows:
        if row.matched is not None:
            other = fixed[row.matched]
            yield Finding(
                f"By entropy ({row.rule.label}) against fixed {other.rule.label}, which prunes as much.",
                None,
                f"KL removed {row.removed:.1%} against {other.removed:.1%}; bias bound {row.bias.value:.2g} against "
                f"{other.bias.value:.2g}; vetoed {row.outcome.veto.value:.1%} against {other.outcome.veto.value:.1%}",
            )


def _table(rows: Sequence[Row]) -> Table:
    def row(row: Row) -> tuple[object, ...]:
        sets, outcome = row.sets, row.outcome
        return (
            *(row.rule.label, 1 - sets.mean("train_mass").value, sets.mean("train_count").value),
            *(str(row.bias), outcome.worst, row.kl, sets.mean("kl_full").value, row.removed),
            *(outcome.veto.value, sets.vetoed("outside"), outcome.mis.value, outcome.kept_weight.value),
            f"{row.reward.value:.3f} ± {row.reward.error:.3f}" if row.reward else None,
        )

    return Table(
        "All rules",
        "Pruned: 1 - Z per token; size of the set; the two bounds on the bias; KL per token with and without pruning; "
        "shares of sequences vetoed, expected to be vetoed from exact sums, and masked by MIS; weight kept by both; "
        "reward after the budget of training.",
        (
            *("rho", "pruned", "set", "bias bound", "Prop. 5.5", "KL", "KL, full", "removed"),
            *("veto", "expected", "MIS", "kept weight", "reward"),
        ),
        tuple(row(each) for each in rows),
    )


def _charts(rows: Sequence[Row]) -> Iterator[Chart]:
    fixed = [row for row in rows if row.matched is None]
    ticks = tuple(row.rule.label for row in fixed)

    def line(label: str, value: Callable[[Row], float], style: str = "o-") -> Series:
        points = [(float(i), value(row)) for i, row in enumerate(fixed)]
        x, y = zip(*((i, y) for i, y in points if math.isfinite(y)), strict=True)
        return Series(label, x, y, style=style)

    def positive(value: float) -> float:
        return value if value > 1e-12 else math.nan

    yield Chart(
        "What pruning can cost",
        "Bounds on the bias of the expected reward, rewards in [0, 1].",
        "rho",
        "bound",
        (
            line("(max R − min R) E[Σ (1 − Z)]", lambda row: positive(row.bias.value)),
            line("R_max T (1 − Z_min)", lambda row: positive(row.outcome.worst), "s--"),
        ),
        ticks,
        y_log=True,
    )
    yield Chart(
        "What is left of a batch",
        "Shares of sequences vetoed and masked, and the importance weight that is kept.",
        "rho",
        "share",
        (
            line("vetoed", lambda row: row.outcome.veto.value),
            line("expected from exact sums", lambda row: row.sets.vetoed("outside"), "--"),
            line("masked by MIS", lambda row: row.outcome.mis.value),
            line("kept weight", lambda row: row.outcome.kept_weight.value),
        ),
        ticks,
    )
    yield Chart(
        "The mismatch",
        "KL per token of the same positions.",
        "rho",
        "nats",
        (
            line("constrained", lambda row: row.kl),
            line("without pruning", lambda row: row.sets.mean("kl_full").value, "s--"),
        ),
        ticks,
        y_log=True,
    )
    if any(row.reward for row in rows):
        yield _rewards(rows)
    yield _trade(rows)


def _rewards(rows: Sequence[Row]) -> Chart:
    found = [(row.rule.label, row.reward) for row in rows if row.reward]
    labels, estimates = zip(*found, strict=True)
    x = tuple(map(float, range(len(found))))
    low, high = tuple(e.low for e in estimates), tuple(e.high for e in estimates)
    series = Series("mean over seeds", x, tuple(e.value for e in estimates), low, high, style="o")
    caption = "Reward after a fixed training budget under the rule, on the lab's small task."
    return Chart("Reward after a fixed budget", caption, "rho", "reward", (series,), labels)


def _trade(rows: Sequence[Row]) -> Chart:
    """Mismatch removed against its cost, for fixed rules and for rules by entropy."""
    kinds = {"fixed": 0.0} | {f"by entropy, slope {slope:+g}": slope for slope in SLOPES}
    series = []
    for label, slope in kinds.items():
        own = sorted((row.bias.value, row.removed) for row in rows if row.rule.slope == slope and row.bias.value > 1e-6)
        x, y = zip(*own, strict=True)
        series.append(Series(label, x, y, style="o-" if label == "fixed" else "D--"))
    caption = "Share of the KL removed against the bias bound that it costs: higher and further left is better."
    return Chart("Fixed rho, or by entropy", caption, "bias bound", "removed", tuple(series), x_log=True)
