"""The proposed rho, and rules by entropy that prune as much as fixed ones."""

from __future__ import annotations

import math

import pytest

from dvp_lab.mismatch import Estimate
from dvp_lab.rho import NOTICEABLE, Row, conclusion, describe, matching, propose
from dvp_lab.rules import NOTHING_PRUNED, Rule
from dvp_lab.sets import Outcome, sets_of
from dvp_lab.study import percent
from tests.unit.lab.test_sets import one_position, sampled


@pytest.mark.parametrize("slope", [0.5, -0.5])
def test_a_rule_by_entropy_prunes_as_much_as_the_fixed_one(slope: float) -> None:
    trace, fixed = sampled(0.1, NOTHING_PRUNED), Rule(-4.0)
    found = matching([trace], fixed, slope)
    masses = [sets_of(trace, rule).mean("train_mass").value for rule in (fixed, found)]
    assert found.slope == slope
    assert 1 - masses[1] == pytest.approx(1 - masses[0], rel=0.1)


def row(log_min_p: float, *, bias: float, veto: float, removed: float, matched: Rule | None = None) -> Row:
    exact = {name: Estimate(value, 0.0) for name, value in (("veto", veto), ("pruned", bias))}
    outcome = Outcome(veto_outside=Estimate(0, 0), mis=Estimate(0, 0), kept_weight=Estimate(1, 0), worst=1.0, **exact)
    return Row(Rule(log_min_p, 0.5 if matched else 0.0), matched, one_position(kl=1 - removed), outcome)


BIASED = row(-2.0, bias=1.5, veto=0.0, removed=0.9)
VETOED = row(-3.0, bias=0.01, veto=0.2, removed=0.8)
ADAPTIVE = row(-4.0, bias=0.01, veto=0.0, removed=0.7, matched=Rule(-5.0))
GOOD = row(-6.0, bias=0.04, veto=0.01, removed=0.3)
SAFE = row(-13.0, bias=0.001, veto=0.0, removed=0.1)
UNPRUNED = row(-math.inf, bias=0.0, veto=0.0, removed=0.0)


def safe(removed: float) -> Row:
    return row(-13.0, bias=0.001, veto=0.0, removed=removed)


def test_the_proposal_removes_most_within_its_limits() -> None:
    assert propose([BIASED, VETOED, ADAPTIVE, GOOD, SAFE]) is GOOD
    assert propose([BIASED, VETOED, SAFE]) is SAFE
    assert propose([BIASED, VETOED]) is VETOED, "the smallest bound where all cost too much"


def test_pruning_nothing_is_no_proposal() -> None:
    growing = safe(-0.1)
    assert propose([BIASED, growing, UNPRUNED]) is growing
    assert propose([BIASED, VETOED, UNPRUNED]) is VETOED


def test_where_there_is_no_mismatch_nothing_is_removed() -> None:
    """Rounding would decide."""
    rounding = one_position(kl=-1e-15, kl_full=1e-14)
    assert SAFE._replace(sets=rounding).removed == 0.0


@pytest.mark.parametrize(
    ("removed", "amount"), [(0.6, "most of it"), (0.3, "a part of it"), (0.016, "little"), (1e-4, "next to nothing")]
)
def test_what_is_removed_is_called_what_it_is(removed: float, amount: str) -> None:
    rows = [safe(removed), VETOED, UNPRUNED]
    said = " ".join(conclusion(rows))
    assert f"It removes {percent(removed)} of the mismatch between engine and trainer, which is {amount}." in said
    assert "rho = e⁻³ removes the most, 80\N{NO-BREAK SPACE}%." in said
    assert ("no fixed rule with" in describe(rows, {}).findings[0].statement) is (removed < NOTICEABLE)


def test_a_mismatch_that_grows_is_not_removed() -> None:
    _, effect, *more = conclusion([safe(-0.1), UNPRUNED])
    assert effect.startswith("It removes nothing of the mismatch between engine and trainer, which grows by 10")
    assert not more


def test_a_cost_beyond_the_rewards_range_is_no_figure() -> None:
    (*_, last) = conclusion([BIASED, SAFE])
    assert "by up to its whole range, and 0\N{NO-BREAK SPACE}% of the sequences are thrown away" in last
    assert len(conclusion([GOOD, SAFE])) == 2, "the proposal itself removes the most"


def test_where_every_rule_costs_too_much_nobody_claims_that_one_is_within_the_limits() -> None:
    rows = [BIASED, VETOED, UNPRUNED]
    assert conclusion(rows)[0].startswith("No rho is within the limits")
    assert "no fixed rule has a bias bound up to 0.05" in describe(rows, {}).findings[0].statement
