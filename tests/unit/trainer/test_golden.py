"""The learner's losses are those of golden.json. A change that moves them on purpose must rewrite the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from dvp_rl.dvp.objective import surrogate_loss
from dvp_trainer.learn import hooks
from tests.unit.trainer.golden import EXPECTED, TOLERANCE, Losses, distance, train

OTHER_SETTINGS = {
    "correction.denominator": "kept",
    "correction.mode": "unit",
    "correction.level": "token",
    "correction.cap": 4.5,
    "correction.veto": 2e-3,
    "correction.baseline": "grpo",
    "sampling.log_min_p": -8.0,
    "sampling.temperature": 1.001,
    "optimizer.warmup_steps": 3,
    "optimizer.max_grad_norm": 0.5,
}
MUTANTS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]] = {
    "wrong sign": lambda logprobs, weights, A, mask, D: -surrogate_loss(logprobs, weights, A, mask, D),
    "denominator one thousandth too large": lambda logprobs, weights, A, mask, D: surrogate_loss(
        logprobs, weights, A, mask, 1.001 * D
    ),
    "last token masked": lambda logprobs, weights, A, mask, D: surrogate_loss(
        logprobs, weights, A, mask & mask.roll(-1, 1), D
    ),
}


@pytest.fixture(scope="module")
def expected() -> Losses:
    losses: Losses = json.loads(EXPECTED.read_text())
    return losses


def test_the_golden_run_uses_every_part_of_the_method(expected: Losses) -> None:
    assert all(metrics["grad/norm"] > 0 for metrics in expected)
    for name in ("veto/total", "mis/fraction"):
        assert any(0 < metrics[name] < 1 for metrics in expected), name


def test_losses_are_the_golden_ones_within_rounding(expected: Losses, tmp_path: Path) -> None:
    assert distance(train(tmp_path), expected) <= TOLERANCE


def test_a_second_run_on_this_machine_has_exactly_the_same_losses(tmp_path: Path) -> None:
    assert train(tmp_path) == train(tmp_path)


@pytest.mark.parametrize(("setting", "value"), OTHER_SETTINGS.items())
def test_the_tolerance_tells_other_settings_apart(
    expected: Losses, tmp_path: Path, setting: str, value: object
) -> None:
    assert distance(train(tmp_path, {setting: value}), expected) > TOLERANCE


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_tolerance_tells_mistakes_apart(
    expected: Losses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: str
) -> None:
    monkeypatch.setattr(hooks, "surrogate_loss", MUTANTS[mutant])
    assert distance(train(tmp_path), expected) > TOLERANCE
