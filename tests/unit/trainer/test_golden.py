"""The learner's losses are those of golden.json. A change that is meant to move them writes the file anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.trainer.golden import EXPECTED, train, train_reproducibly

Losses = list[dict[str, float]]


@pytest.fixture(scope="module")
def expected() -> Losses:
    losses: Losses = json.loads(EXPECTED.read_text())
    return losses


def test_the_golden_run_uses_every_part_of_the_method(expected: Losses) -> None:
    assert all(step["grad/norm"] > 0 for step in expected)
    for name in ("veto/total", "mis/fraction"):
        assert any(0 < step[name] < 1 for step in expected), name


def test_losses_are_the_golden_ones_exactly_under_reproducible_arithmetic(expected: Losses) -> None:
    assert train_reproducibly() == expected


def test_losses_are_the_golden_ones_within_rounding_on_this_machine(expected: Losses, tmp_path: Path) -> None:
    for actual, golden in zip(train(tmp_path), expected, strict=True):
        assert actual == pytest.approx(golden, rel=1e-5, abs=1e-6)
