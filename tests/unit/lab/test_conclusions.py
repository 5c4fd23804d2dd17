"""What a study tells a layman, from numbers that are known."""

from __future__ import annotations

import math

import pytest
import torch

from dvp_lab import collapse, overlap, signature
from dvp_lab.engines import Engine
from dvp_lab.mismatch import Estimate
from dvp_lab.rules import Rule
from dvp_lab.sets import Outcome
from dvp_lab.signature import Distance
from tests.unit.lab.test_sets import one_position


def test_the_distance_of_an_engine() -> None:
    """Three sequences in two batches: one of weight 1, one whose weight 4 MIS drops, one of weight 1/2."""
    first = torch.tensor([[0.1, -0.1], [math.log(2), math.log(2)]], dtype=torch.float64)
    second = torch.tensor([[-math.log(2), 0.0, 0.0]], dtype=torch.float64)
    masks = torch.ones_like(first, dtype=torch.bool), torch.tensor([[True, False, False]])
    found = Distance.of("e", (first, masks[0]), (second, masks[1]))
    assert found.size == pytest.approx((0.2 + 3 * math.log(2)) / 5)
    assert found.length == pytest.approx(5 / 3)
    assert found.within == pytest.approx(2 / 3)
    assert found.kept_weight == pytest.approx(1.5 / 3)
    empty = torch.zeros(4, 3, dtype=torch.float64)
    assert Distance.of("e", (first, masks[0]), (second, masks[1]), (empty, empty.bool())) == found


def test_the_closest_and_the_farthest_engine_are_told() -> None:
    near, middle, far = (
        Distance(name, size, length=160.0, within=within, kept_weight=kept)
        for name, size, within, kept in [("near", 0.001, 1.0, 1.0), ("middle", 0.01, 0.9, 0.9), ("far", 0.05, 0.4, 0.5)]
    )
    _, first, last = signature.conclusion([middle, far, near])
    assert first.startswith(
        "near, the closest of these engines: a token's probability is typically off by 0.1\N{NO-BREAK SPACE}%"
    )
    assert last.startswith("far, the farthest: a token's probability is typically off by 5.13\N{NO-BREAK SPACE}%.")
    assert "samples of 160 tokens, 40\N{NO-BREAK SPACE}% of the sequences stay within a factor of 2" in last
    assert "keeps 0.50 of the weight" in last
    _, only = signature.conclusion([near])
    assert only.startswith("near: a token's")
    (none,) = signature.conclusion([])
    assert none.startswith("No engine here differs")


def outside(*probabilities: float) -> list[overlap.Row]:
    """The results at e⁻² and smaller rhos, with these probabilities of a token outside at the only position."""
    exact = Estimate(0.0, 0.0)
    outcome = Outcome(exact, exact, exact, exact, exact, worst=0.0)
    rules = (Rule(-2.0), Rule(-13.0))
    return [
        overlap.Row(rule, one_position(outside=probability), outcome, num_sequences=1)
        for rule, probability in zip(rules, probabilities, strict=False)
    ]


def test_tokens_outside_are_told_for_the_worst_engine() -> None:
    found = {Engine.FP32: outside(0.0, 0.0), Engine.BF16: outside(0.01, 1e-6)}
    _, small, large, _ = overlap.conclusion(found)
    assert small == (
        "rho = e⁻¹³: with transformers-bf16, the worst of these engines, one token in 1,000,000 is such a token, and "
        "1e-4\N{NO-BREAK SPACE}% of the sequences are thrown away."
    )
    assert "one token in 100 is such a token, and 1\N{NO-BREAK SPACE}% of the sequences" in large
    _, small, _, _ = overlap.conclusion({Engine.FP32: outside(0.0, 0.0)})
    assert small == "rho = e⁻¹³: there is no such token."
    _, only, _, _ = overlap.conclusion({Engine.FP32: outside(0.7)})
    assert only.startswith(
        "rho = e⁻²: with transformers-fp32, 70\N{NO-BREAK SPACE}% of the tokens are such tokens, and"
    )


def test_the_fates_of_the_arms_are_told() -> None:
    labels = [arm.label for arm in collapse.ARMS]
    naive, dvp_mis, rollout_only, _ = collapse.conclusion(
        5, dict(zip(labels, range(7), strict=True)), dict(zip(labels, (0.1 * i for i in range(7)), strict=True))
    )
    assert naive.endswith("(naive): 0 of 5 runs collapsed, mean reward at the end 0; without the mismatch it is 0.6.")
    assert dvp_mis.endswith("(DVP + MIS): 5 of 5 runs collapsed, mean reward at the end 0.5.")
    assert rollout_only.endswith("(min-p in rollout only): 3 of 5 runs collapsed, mean reward at the end 0.3.")
