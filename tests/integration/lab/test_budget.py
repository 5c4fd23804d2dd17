"""Training under a rule that both sides prune by."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

from dvp_lab import chain
from dvp_lab.budget import Budget, RuledRun, rewards
from dvp_lab.rules import NOTHING_PRUNED, Rule
from dvp_lab.training import Mismatch


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("budget") / "model"
    chain.teach(folder, 20)
    return folder


def metrics(model: Path, slope: float, mismatch: Mismatch, steps: int = 3) -> list[dict[str, float]]:
    run = RuledRun(
        model,
        0,
        steps,
        8,
        1e-3,
        mismatch=mismatch,
        train_log_min_p=-2.0,
        infer_log_min_p=-2.0,
        groups=4,
        n=4,
        slope=slope,
    )
    return list(islice(run, steps))


def test_a_rule_that_hardly_looks_at_entropy_trains_as_the_fixed_one(model: Path) -> None:
    """The trainer's own policy and the one that computes full logits give the same results."""
    fixed, ruled = (metrics(model, slope, Mismatch(field=0.2)) for slope in (0.0, 1e-7))
    for before, after in zip(fixed, ruled, strict=True):
        assert after["reward/mean"] == before["reward/mean"]
        assert after["mismatch/kl"] == pytest.approx(before["mismatch/kl"], abs=1e-4)
        assert after["grad/norm"] == pytest.approx(before["grad/norm"], rel=1e-3)


def test_both_sides_prune_by_the_same_rule(model: Path) -> None:
    fixed, ruled = (metrics(model, slope, Mismatch(), 1)[0] for slope in (0.0, 0.5))
    assert ruled["kept/count_mean_train"] > fixed["kept/count_mean_train"] + 1
    assert ruled["kept/count_mean_train"] == pytest.approx(ruled["kept/count_mean_infer"], abs=0.1)
    assert abs(ruled["mismatch/kl"]) < 1e-4
    assert ruled["mismatch/outside_rate"] < 0.01


@pytest.mark.slow
def test_every_rule_gets_a_reward_and_no_run_is_made_twice(model: Path, tmp_path: Path) -> None:
    chain.teach(tmp_path / "model", 20)
    budget = Budget(tmp_path, steps=12, seeds=(1, 2))
    rules = [Rule(-2.0), Rule(-1.0, 0.5), NOTHING_PRUNED]
    found = rewards(rules, budget, progress=lambda *_: None)
    assert list(found) == rules
    assert all(0 < estimate.value < 1 for estimate in found.values())
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("rule-*.json")}
    assert len(written) == 6
    assert rewards(rules, budget, progress=lambda *_: None) == found
    assert {path: path.stat().st_mtime_ns for path in written} == written
