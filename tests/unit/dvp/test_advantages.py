"""Advantages against the formulas in plain Python, float64."""

from __future__ import annotations

import logging
from statistics import mean, stdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dvp_rl.dvp.advantages import STD_EPS, _warn_single, advantages, uniform_groups
from dvp_rl.dvp.options import Baseline

REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.25, 0.5, -1.0, 2.0]]

groups = st.integers(2, 6).flatmap(
    lambda n: st.lists(st.lists(st.floats(-100, 100), min_size=n, max_size=n), min_size=1, max_size=4)
)


def tensor(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def others(row: list[float], i: int) -> list[float]:
    return row[:i] + row[i + 1 :]


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    expected = [[r - mean(others(row, i)) for i, r in enumerate(row)] for row in REWARDS]
    torch.testing.assert_close(advantages(tensor(REWARDS)), tensor(expected), rtol=0, atol=1e-15)


def test_grpo_subtracts_the_group_mean() -> None:
    expected = [[r - mean(row) for r in row] for row in REWARDS]
    torch.testing.assert_close(advantages(tensor(REWARDS), Baseline.GRPO), tensor(expected), rtol=0, atol=1e-15)


def test_grpo_std_divides_by_the_sample_deviation() -> None:
    expected = [[(r - mean(row)) / (stdev(row) + STD_EPS) for r in row] for row in REWARDS]
    torch.testing.assert_close(advantages(tensor(REWARDS), Baseline.GRPO_STD), tensor(expected), rtol=0, atol=1e-14)


def test_weighted_baseline_is_over_kept_others() -> None:
    row, w = [1.0, 0.0, 3.0], [0.5, 0.0, 1.5]
    actual = advantages(tensor([row]), Baseline.RLOO_WEIGHTED, weights=tensor([w]))
    expected = [1 - 3.0, 0 - (0.5 * 1 + 1.5 * 3) / 2.0, 3 - 1.0]
    torch.testing.assert_close(actual, tensor([expected]), rtol=0, atol=1e-15)


def test_weighted_baseline_without_a_kept_other_is_the_plain_mean() -> None:
    actual = advantages(tensor([[1.0, 0.0, 3.0]]), Baseline.RLOO_WEIGHTED, weights=tensor([[0.7, 0.0, 0.0]]))
    torch.testing.assert_close(actual, tensor([[1 - 1.5, 0 - 1.0, 3 - 1.0]]), rtol=0, atol=1e-15)


def test_a_huge_weight_costs_the_others_no_digits() -> None:
    actual = advantages(tensor([[5.0, 1.0, 0.0]]), Baseline.RLOO_WEIGHTED, weights=tensor([[1e18, 1.0, 1.0]]))
    assert actual[0, 0] == 5.0 - 0.5


@pytest.mark.parametrize("baseline", Baseline)
def test_an_uncounted_sample_has_no_part(baseline: Baseline) -> None:
    counted = torch.tensor([[True, True, False, True]])
    weights = torch.ones(1, 4, dtype=torch.float64)
    actual = advantages(tensor([[1.0, 0.0, 50.0, 1.0]]), baseline, counted=counted, weights=weights)
    without = advantages(tensor([[1.0, 0.0, 1.0]]), baseline, weights=weights[:, :3])
    torch.testing.assert_close(actual[:, [0, 1, 3]], without, rtol=0, atol=1e-15)
    assert actual[0, 2] == 0


def test_a_single_counted_sample_of_many_teaches_nothing() -> None:
    counted = torch.tensor([[True, False, False]])
    assert not advantages(tensor([[1.0, 0.0, 0.0]]), counted=counted).any()


def test_a_group_of_one_keeps_its_reward_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    _warn_single.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert advantages(tensor([[0.75]])).item() == 0.75
    assert len(caplog.records) == 1
    assert "A = R" in caplog.text


@given(groups)
def test_properties(rows: list[list[float]]) -> None:
    rewards, n = tensor(rows), len(rows[0])
    rloo, grpo = advantages(rewards), advantages(rewards, Baseline.GRPO)
    torch.testing.assert_close(rloo.sum(1), torch.zeros(len(rows), dtype=torch.float64), rtol=0, atol=1e-11)
    torch.testing.assert_close(grpo, rloo * (n - 1) / n, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(advantages(rewards + 3), rloo, rtol=1e-9, atol=1e-11)
    weighted = advantages(rewards, Baseline.RLOO_WEIGHTED, weights=torch.full_like(rewards, 0.3))
    torch.testing.assert_close(weighted, rloo, rtol=1e-9, atol=1e-11)


@given(st.floats(-1e6, 1e6), st.integers(2, 9), st.sampled_from(list(Baseline)))
def test_equal_rewards_give_exactly_zero(reward: float, n: int, baseline: Baseline) -> None:
    rewards = torch.full((1, n), reward, dtype=torch.float64)
    assert uniform_groups(rewards).all()
    assert not advantages(rewards, baseline, weights=torch.rand(1, n, dtype=torch.float64)).any()


def test_uniform_groups_tells_them_apart() -> None:
    rewards = tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.999]])
    assert uniform_groups(rewards).tolist() == [True, False]
    assert uniform_groups(tensor([[1.0], [0.0]])).tolist() == [False, False]
    assert uniform_groups(rewards, torch.tensor([[True] * 3, [True, True, False]])).tolist() == [True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("baseline", Baseline)
def test_the_dtype_stays(dtype: torch.dtype, baseline: Baseline) -> None:
    rewards = tensor(REWARDS).to(dtype)
    assert advantages(rewards, baseline, weights=torch.ones_like(rewards)).dtype is dtype
