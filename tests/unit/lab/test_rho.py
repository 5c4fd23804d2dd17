"""The proposed rho, and rules by entropy that prune as much as fixed ones."""

from __future__ import annotations

import pytest
import torch

from dvp_lab.mismatch import Estimate
from dvp_lab.rho import Row, matching, propose
from dvp_lab.rules import NOTHING_PRUNED, Rule
from dvp_lab.sets import Outcome, Sets, sets_of
from tests.unit.lab.test_sets import sampled


@pytest.mark.parametrize("slope", [0.5, -0.5])
def test_a_rule_by_entropy_prunes_as_much_as_the_fixed_one(slope: float) -> None:
    trace, fixed = sampled(0.1, NOTHING_PRUNED), Rule(-4.0)
    found = matching([trace], fixed, slope)
    masses = [sets_of(trace, rule).mean("train_mass").value for rule in (fixed, found)]
    assert found.slope == slope
    assert 1 - masses[1] == pytest.approx(1 - masses[0], rel=0.1)


def row(log_min_p: float, *, bias: float, veto: float, removed: float, matched: Rule | None = None) -> Row:
    one = torch.ones(1, 1, dtype=torch.float64)
    others = {name: one for name in Sets.__dataclass_fields__ if name not in ("mask", "kl", "kl_full")}
    sets = Sets(mask=one.bool(), kl=one * (1 - removed), kl_full=one, **others)
    exact = {name: Estimate(value, 0.0) for name, value in (("veto", veto), ("pruned", bias))}
    outcome = Outcome(veto_outside=Estimate(0, 0), mis=Estimate(0, 0), kept_weight=Estimate(1, 0), worst=1.0, **exact)
    return Row(Rule(log_min_p, 0.5 if matched else 0.0), matched, sets, outcome)


def test_the_proposal_removes_most_within_its_limits() -> None:
    biased = row(-2.0, bias=0.5, veto=0.0, removed=0.9)
    vetoed = row(-3.0, bias=0.01, veto=0.2, removed=0.8)
    adaptive = row(-4.0, bias=0.01, veto=0.0, removed=0.7, matched=Rule(-5.0))
    good = row(-6.0, bias=0.04, veto=0.01, removed=0.3)
    safe = row(-13.0, bias=0.001, veto=0.0, removed=0.1)
    assert propose([biased, vetoed, adaptive, good, safe]) is good
    assert propose([biased, vetoed, safe]) is safe
    assert propose([biased, vetoed]) is vetoed, "the smallest bound where all cost too much"
