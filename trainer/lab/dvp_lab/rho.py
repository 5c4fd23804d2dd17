"""Which rho: how much mismatch pruning removes, what it costs, and how much of a training batch is left."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from . import chain
from .budget import LENGTH, RATE, WINDOW, Budget, rewards
from .engines import Engine
from .mismatch import NEXT_TO_NOTHING, SIGMAS, Estimate
from .rules import AXIS, NOTHING_PRUNED, Rule
from .sets import Outcome, Sets, joined, seen_of, sets_of
from .sources import Source, Trace, Trainer, opened, traces
from .study import Chart, Finding, Series, Study, Table, percent, short
from .subject import Progress, Subject

FIXED = (*(Rule(-float(nats)) for nats in (2, 3, 4, 5, 6, 8, 10, 13, 16, 20)), NOTHING_PRUNED)
MATCHED = (Rule(-3.0), Rule(-5.0), Rule(-8.0))
"""Fixed rules. One rule by entropy per slope is made to prune as much as each of them."""
SLOPES = (0.5, -0.5)
"""Slopes of the rules by entropy. The first prunes less where the model is unsure, the second more."""
KINDS = {"fixed": 0.0} | {f"by entropy, slope {slope:+g}": slope for slope in SLOPES}
"""Slopes by their name in a legend."""
MAX_BIAS, MAX_VETO = 0.05, 0.05
"""Most that the proposal may cost: bias bound as a share of the rewards' range, and share of sequences vetoed."""
NOTICEABLE = 0.01
"""Smallest share of the mismatch whose removal counts as a reason."""
AMOUNTS = ((0.5, "most of it"), (0.1, "a part of it"), (NOTICEABLE, "little"), (0.0, "next to nothing"))
"""Words for the share of the mismatch that a rule removes, by the smallest share of each."""
LIMITS = f"a bias bound up to {MAX_BIAS:g} of the rewards' range and up to {percent(MAX_VETO)} of sequences vetoed"
OTHER_MODEL = (
    "The reward is that of another model, not of the one above: a small one of the lab, trained on the lab's own task "
    "under every rule."
)
PRUNED_TRAINING = (
    "The samples that the reward counts were also drawn under the rule: a large rho gains there in part because it "
    "forbids slips from the first step on. Rules by entropy are made to prune as much as fixed ones on the text of the "
    "model above, not on that task."
)


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
        """Share of the KL per token that pruning removes, against the same positions without pruning; 0 if there is
        next to nothing to remove."""
        full = self.sets.mean("kl_full").value
        return 1 - self.kl / full if self.rule.prunes and full > NEXT_TO_NOTHING else 0.0

    @property
    def is_allowed(self) -> bool:
        return self.bias.value <= MAX_BIAS and self.outcome.veto.value <= MAX_VETO


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
    """Of the fixed rules that prune, the one that removes the most mismatch, with at most MAX_BIAS and MAX_VETO. If no
    rule is within these limits, the one with the smallest bias bound."""
    fixed = _fixed(rows)
    allowed = [row for row in fixed if row.is_allowed]
    if not allowed:
        return min(fixed, key=lambda row: row.bias.value)
    return max(allowed, key=lambda row: row.removed)


def _fixed(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.matched is None and row.rule.prunes]


# --- the page ---------------------------------------------------------------------------------------------------------


def describe(rows: Sequence[Row], settings: dict[str, object]) -> Study:
    trained = any(row.reward for row in rows)
    return Study(
        name="rho",
        title="Which rho",
        abstract="Every rule is measured on text that the engine sampled under it: how much mismatch it removes, how "
        "far it can move the expected reward, and how many sequences veto and importance weights leave."
        + (f" {OTHER_MODEL}" if trained else ""),
        settings=settings,
        findings=(_proposal(rows), *_comparisons(rows)),
        charts=tuple(_charts(rows)),
        tables=(_table(rows),),
        notes=(
            "The bounds grow with the length of the sequences: longer ones need a smaller rho.",
            "Bias bound: (max R - min R) E[sum_t (1 - Z_t)] with rewards in [0, 1]; above 1 it is vacuous. It bounds "
            "how far J_mp is from J for any reward; training under J_mp can do better or worse.",
            "KL is per token, exact, over tokens that both sides keep, against the same positions without pruning.",
            *((PRUNED_TRAINING,) if trained else ()),
        ),
        conclusion=conclusion(rows),
    )


def _proposal(rows: Sequence[Row]) -> Finding:
    best = propose(rows)
    reason = f"of the fixed rules with {LIMITS}, it removes the most mismatch"
    if not best.is_allowed:
        reason = f"no fixed rule has {LIMITS}; this one has the smallest bias bound"
    elif best.removed < NOTICEABLE:
        reason = f"no fixed rule with {LIMITS} removes {percent(NOTICEABLE)} of the mismatch; this one guards the tail"
    return Finding(
        f"Proposed: rho = {best.rule.label}. Reason: {reason}.",
        None,
        f"{percent(best.removed)} of the KL removed; bias bound {best.bias}; "
        f"{percent(best.outcome.veto.value)} vetoed, {percent(best.outcome.mis.value)} masked, kept weight "
        f"{short(best.outcome.kept_weight.value)}",
    )


def conclusion(rows: Sequence[Row]) -> tuple[str, ...]:
    """The proposal for a layman, and what the fixed rule that removes the most would cost."""
    best, most = propose(rows), max(_fixed(rows), key=lambda row: row.removed)
    rho = best.rule.label
    use = f"Use rho = {rho}: tokens that are less likely than {rho} times the likeliest are never sampled."
    if not best.is_allowed:
        use = f"No rho is within the limits ({LIMITS}). The smallest bias bound is that of rho = {rho}."
    sentences = (use, f"{_effect(best)} {_cost(best)}")
    if most.removed <= max(best.removed, 0.0):
        return sentences
    return (*sentences, f"rho = {most.rule.label} removes the most, {percent(most.removed)}. {_cost(most)}")


def _effect(row: Row) -> str:
    mismatch = "the mismatch between engine and trainer"
    if row.removed < 0:
        return f"It removes nothing of {mismatch}, which grows by {percent(-row.removed)}."
    amount = next(word for least, word in AMOUNTS if row.removed >= least)
    return f"It removes {percent(row.removed)} of {mismatch}, which is {amount}."


def _cost(row: Row) -> str:
    moved = "its whole range" if row.bias.value >= 1 else f"{percent(row.bias.value)} of its range"
    return (
        f"Its price: it may move the expected reward by up to {moved}, and {percent(row.outcome.veto.value)} of the "
        "sequences are thrown away."
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
                f"KL removed {percent(row.removed)} against {percent(other.removed)}; bias bound "
                f"{short(row.bias.value)} against {short(other.bias.value)}; vetoed "
                f"{percent(row.outcome.veto.value)} against {percent(other.outcome.veto.value)}",
            )


def _table(rows: Sequence[Row]) -> Table:
    def row(row: Row) -> tuple[object, ...]:
        sets, outcome = row.sets, row.outcome
        return (
            *(row.rule.label, 1 - sets.mean("train_mass").value, sets.mean("train_count").value),
            *(str(row.bias), outcome.worst, row.kl, sets.mean("kl_full").value, row.removed),
            *(outcome.veto.value, sets.vetoed("outside"), outcome.mis.value, outcome.kept_weight.value),
            *((f"{row.reward.value:.3f} ± {row.reward.error:.3f}",) if row.reward else ()),
        )

    trained = any(row.reward for row in rows)
    return Table(
        "All rules",
        "Pruned: 1 - Z per token; size of the set; the two bounds on the bias; KL per token with and without pruning; "
        "shares of sequences vetoed, expected to be vetoed from exact sums, and masked by MIS; weight kept by both"
        + ("; reward after the budget of training." if trained else "."),
        (
            *("rho", "pruned", "set", "bias bound", "Prop. 5.5", "KL", "KL, full", "removed"),
            *("veto", "expected", "MIS", "kept weight"),
            *(("reward",) if trained else ()),
        ),
        tuple(row(each) for each in rows),
    )


def _charts(rows: Sequence[Row]) -> Iterator[Chart]:
    fixed = [row for row in rows if row.matched is None]
    ticks = tuple(row.rule.nats for row in fixed)

    def line(label: str, value: Callable[[Row], float], style: str = "o-") -> Series:
        points = [(float(i), value(row)) for i, row in enumerate(fixed)]
        known = [(i, y) for i, y in points if math.isfinite(y)]
        x, y = (tuple(point[axis] for point in known) for axis in (0, 1))
        return Series(label, x, y, style=style)

    def positive(value: float) -> float:
        return value if value > 1e-12 else math.nan

    yield Chart(
        "What pruning can cost",
        "Bounds on the bias of the expected reward, rewards in [0, 1].",
        AXIS,
        "share of the rewards' range",
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
        AXIS,
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
        AXIS,
        "KL per token (nats)",
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
    """Rewards by fixed rule; a rule by entropy stands beside the fixed one that prunes as much."""
    places = {row.rule: place for place, row in enumerate(row for row in rows if row.matched is None)}
    series = []
    for shift, (label, slope) in zip((0.0, 0.2, -0.2), KINDS.items(), strict=True):
        own = [(places[row.matched or row.rule], row.reward) for row in rows if row.reward and row.rule.slope == slope]
        x, found = tuple(place + shift for place, _ in own), [reward for _, reward in own]
        low, high = tuple(e.low for e in found), tuple(e.high for e in found)
        series.append(Series(label, x, tuple(e.value for e in found), low, high, style="o"))
    caption = (
        "Another model, the lab's small one, after a fixed budget of training under the rule. A rule by entropy stands "
        "beside the fixed one that prunes as much."
    )
    ticks = tuple(rule.nats for rule in places)
    return Chart("Reward after a fixed budget", caption, AXIS, "mean reward", tuple(series), ticks)


def _trade(rows: Sequence[Row]) -> Chart:
    """Mismatch removed against its cost, for fixed rules and for rules by entropy."""
    series = []
    for label, slope in KINDS.items():
        own = sorted((row.bias.value, row.removed) for row in rows if row.rule.slope == slope and row.bias.value > 1e-6)
        x, y = (tuple(point[axis] for point in own) for axis in (0, 1))
        series.append(Series(label, x, y, style="o-" if label == "fixed" else "D--"))
    caption = "Share of the KL removed against the bias bound that it costs: higher and further left is better."
    return Chart(
        "Fixed rho, or by entropy",
        caption,
        "bias bound (share of the rewards' range)",
        "share of the KL removed",
        tuple(series),
        x_log=True,
    )
