"""The proposed rho, and rules by entropy that prune as much as fixed ones."""

from __future__ import annotations

import pytest

from dvp_lab.mismatch import Estimate
from dvp_lab.rho import NOTICEABLE, Merits, conclusion, matching, proposal, propose
from dvp_lab.rules import NOTHING_PRUNED, Rule
from dvp_lab.sets import sets_of
from dvp_lab.study import percent
from tests.unit.lab.test_sets import sampled


@pytest.mark.parametrize("slope", [0.5, -0.5])
def test_a_rule_by_entropy_prunes_as_much_as_the_fixed_one(slope: float) -> None:
    trace, fixed = sampled(0.1, NOTHING_PRUNED), Rule(-4.0)
    found = matching([trace], fixed, slope)
    masses = [sets_of(trace, rule).mean("train_mass").value for rule in (fixed, found)]
    assert found.slope == slope
    assert 1 - masses[1] == pytest.approx(1 - masses[0], rel=0.1)


def merits(rule: str, *, bias: float, veto: float, removed: float) -> Merits:
    return Merits(rule, removed, Estimate(bias, 0.0), veto, mis=0.0, kept_weight=1.0)


BIASED = merits("e⁻²", bias=1.5, veto=0.0, removed=0.9)
VETOED = merits("e⁻³", bias=0.01, veto=0.2, removed=0.8)
GOOD = merits("e⁻⁶", bias=0.04, veto=0.01, removed=0.3)
SAFE = merits("e⁻¹³", bias=0.001, veto=0.0, removed=0.1)


def test_the_proposal_removes_most_within_its_limits() -> None:
    assert propose([BIASED, VETOED, GOOD, SAFE]) is GOOD
    assert propose([BIASED, VETOED, SAFE]) is SAFE
    assert propose([BIASED, VETOED]) is VETOED, "the smallest bound where all cost too much"


@pytest.mark.parametrize(
    ("removed", "amount"), [(0.6, "most of it"), (0.3, "a part of it"), (0.016, "little"), (1e-4, "next to nothing")]
)
def test_what_is_removed_is_called_what_it_is(removed: float, amount: str) -> None:
    best = SAFE._replace(removed=removed)
    said = " ".join(conclusion([best, VETOED]))
    assert f"It removes {percent(removed)} of the mismatch between engine and trainer, which is {amount}." in said
    assert "rho = e⁻³ removes the most, 80\N{NO-BREAK SPACE}%." in said
    assert ("no fixed rule with" in proposal([best, VETOED]).statement) is (removed < NOTICEABLE)


def test_a_mismatch_that_grows_is_not_removed() -> None:
    _, effect, *more = conclusion([SAFE._replace(removed=-0.1)])
    assert effect.startswith("It removes nothing of the mismatch between engine and trainer, which grows by 10")
    assert not more


def test_a_cost_beyond_the_rewards_range_is_no_figure() -> None:
    (*_, last) = conclusion([BIASED, SAFE])
    assert "by up to its whole range, and 0\N{NO-BREAK SPACE}% of the sequences are thrown away" in last
    assert len(conclusion([GOOD, SAFE])) == 2, "the proposal itself removes the most"


def test_where_every_rule_costs_too_much_nobody_claims_that_one_is_within_the_limits() -> None:
    assert conclusion([BIASED, VETOED])[0].startswith("No rho is within the limits")
    assert "no fixed rule has a bias bound up to 0.05" in proposal([BIASED, VETOED]).statement
