"""Veto and importance weights: reasons, levels, both kinds of bounds, and tokens that must never pass."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dvp_rl.dvp.correction import (
    LOG_VETO,
    Correction,
    correct,
    importance_weights,
    level_ratios,
    veto,
)
from dvp_rl.dvp.denominators import Denominator, denominator
from dvp_rl.dvp.options import Bounds, Level, Mode
from dvp_rl.dvp.policy import constrained_logprobs
from tests.unit.dvp import oracle

LEVELS, MODES, BOUNDS = list(Level), list(Mode), list(Bounds)


def ones(log_ratios: Tensor) -> Tensor:
    return torch.ones_like(log_ratios, dtype=torch.bool)


def test_each_reason_and_only_one_per_sequence() -> None:
    log_ratios = torch.tensor([[0.1, -0.1], [0.0, -9.3], [-40.0, 0.0], [math.nan, -40.0], [0.0, LOG_VETO + 0.01]])
    inside = ones(log_ratios)
    inside[2, 0] = inside[3, 1] = False
    got = veto(log_ratios, inside, ones(log_ratios))
    assert got.numerical.tolist() == [False, True, False, False, False]
    assert got.outside.tolist() == [False, False, True, False, False]
    assert got.nan.tolist() == [False, False, False, True, False]
    assert got.dropped.tolist() == [False, True, True, True, False]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
def test_only_model_tokens_count(level: Level, mode: Mode) -> None:
    clean = torch.tensor([[0.2, -0.1]])
    dirty = torch.tensor([[0.2, -0.1, math.nan, -99.0, math.inf]])
    mask = torch.tensor([[True, True, False, False, False]])
    inside = torch.tensor([[True, True, True, False, False]])
    plain = correct(clean, torch.zeros(1, 2), ones(clean), ones(clean), level=level, mode=mode)
    padded = correct(dirty, torch.zeros(1, 5), inside, mask, level=level, mode=mode)
    assert not padded.veto.dropped.any()
    assert torch.equal(padded.weights[:, :2], plain.weights)
    assert (padded.weights[:, 2:] == 0).all()
    assert not padded.kept[:, 2:].any()


@pytest.mark.parametrize("log_min_p", [-13.0, -30.0])
@pytest.mark.parametrize("shift", [0.0, 100.0, -100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
def test_an_outside_token_always_drops_its_sequence(
    level: Level, mode: Mode, dtype: torch.dtype, shift: float, log_min_p: float
) -> None:
    """One token of 400 is outside, and its log-prob in the engine is as low as the engine's set allows."""
    logits = torch.zeros(2, 400, 4)
    logits[..., 1], logits[0, 7, 2] = -1.0, log_min_p - 5
    logits = (logits + shift).to(dtype)
    ids = torch.zeros(2, 400, dtype=torch.long)
    ids[0, 7] = 2
    train = constrained_logprobs(logits, ids, log_min_p=log_min_p, temperature=1.0)
    infer = train.logprobs.clone()
    infer[0, 7] = log_min_p
    mask = ones(infer)
    got = correct(train.logprobs, infer, train.inside, mask, level=level, mode=mode, log_veto=-math.inf)
    assert got.veto.outside.tolist() == [True, False]
    assert (got.weights[0] == 0).all()
    assert got.kept_sequences.tolist() == [False, True]
    assert (got.weights[1] == 1).all()


def test_outside_is_dropped_by_membership_where_no_size_shows_it() -> None:
    log_ratios = torch.zeros(1, 3)
    inside = torch.tensor([[True, False, True]])
    assert veto(log_ratios, inside, ones(log_ratios)).outside.tolist() == [True]


def test_veto_sees_what_the_clamp_hides() -> None:
    train = torch.tensor([[-30.0, -1.0], [-1.0, -1.0]])
    infer = torch.tensor([[-1.0, -30.0], [-1.0, -1.0]])  # the sum of l is 0 and the clamped product 1
    got = correct(train, infer, ones(train), ones(train))
    assert got.ratios[0, 0] == 1
    assert got.veto.numerical.tolist() == [True, False]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
def test_nan_is_vetoed_and_never_reaches_a_weight(level: Level, mode: Mode) -> None:
    train = torch.tensor([[math.nan, -1.0], [-1.0, -1.0]])
    got = correct(train, torch.full((2, 2), -1.0), ones(train), ones(train), level=level, mode=mode)
    assert got.veto.nan.tolist() == [True, False]
    assert got.weights.tolist() == [[0, 0], [1, 1]]
    bare = importance_weights(got.log_ratios, ones(train), level=level, mode=mode)
    assert not bare.values.isnan().any()


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
def test_weights_against_the_oracle(level: Level, mode: Mode, bounds: Bounds) -> None:
    log_ratios = torch.randn(200, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    lengths = torch.arange(200) % 6 + 1
    mask = torch.arange(6) < lengths[:, None]
    got = importance_weights(log_ratios, mask, level=level, mode=mode, bounds=bounds, cap=1.5)
    for row, length in enumerate(lengths.tolist()):
        logs = log_ratios[row, :length].numpy()
        expected = oracle.bounded_weights(logs, level, mode, bounds, 1.5)
        np.testing.assert_allclose(got.values[row, :length].numpy(), expected, rtol=1e-12)
        assert np.array_equal(got.kept[row, :length].numpy(), expected > 0)
        free = oracle.bounded_weights(logs, level, "none", bounds, 1.5)
        np.testing.assert_allclose(got.ratios[row, :length].numpy(), free, rtol=1e-12)
        assert (got.values[row, length:] == 0).all()
        assert not got.kept[row, length:].any()
    assert mode is not Mode.MIS or 0.05 < got.kept.sum() / mask.sum() < 0.95


def test_the_log_weight_is_clamped_to_twenty() -> None:
    log_ratios = torch.tensor([[30.0, 30.0], [-30.0, -30.0]])
    got = importance_weights(log_ratios, ones(log_ratios), mode=Mode.NONE)
    torch.testing.assert_close(got.ratios[:, 0], torch.tensor([20.0, -20.0]).exp())


def test_cap_must_be_at_least_one() -> None:
    with pytest.raises(ValueError, match=r"cap 0\.5"):
        importance_weights(torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), cap=0.5)


def test_a_sequence_without_model_tokens_is_neutral() -> None:
    log_ratios = torch.full((2, 3), math.nan)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    for level in LEVELS:
        assert (level_ratios(log_ratios, mask, level) == 1).all()
    got = correct(log_ratios, log_ratios, mask, mask)
    assert not got.veto.dropped.any()
    assert not got.kept_sequences.any()


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (3, 0)])
def test_empty_batches(shape: tuple[int, int]) -> None:
    empty = torch.zeros(shape)
    for level in LEVELS:
        got = correct(empty, empty, empty.bool(), empty.bool(), level=level)
        assert isinstance(got, Correction)
        assert got.weights.shape == got.ratios.shape == got.kept.shape == shape
        assert got.kept_sequences.shape == got.veto.dropped.shape == shape[:1]


def test_nothing_has_a_gradient_and_float64_stays() -> None:
    train = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    got = correct(train, torch.zeros(1, 2), ones(train), ones(train))
    assert not got.weights.requires_grad
    assert got.weights.dtype == torch.float64
    assert correct(train.bfloat16(), torch.zeros(1, 2), ones(train), ones(train)).weights.dtype == torch.float32


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.floats(-60, 0, width=32), min_size=4, max_size=4), max_size=5),
    st.sampled_from(LEVELS),
    st.sampled_from(MODES),
    st.sampled_from(BOUNDS),
)
def test_on_policy_every_weight_is_exactly_one(
    rows: list[list[float]], level: Level, mode: Mode, bounds: Bounds
) -> None:
    logprobs = torch.tensor(rows).reshape(-1, 4)
    got = correct(logprobs, logprobs, ones(logprobs), ones(logprobs), level=level, mode=mode, bounds=bounds)
    assert (got.weights == 1).all()
    assert got.kept.all()
    assert not got.veto.dropped.any()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-80, 80, width=32) | st.just(math.nan), min_size=1, max_size=6),
    st.sampled_from(LEVELS),
    st.sampled_from(MODES),
    st.sampled_from(BOUNDS),
)
def test_weights_are_always_finite_and_in_bounds(row: list[float], level: Level, mode: Mode, bounds: Bounds) -> None:
    train = torch.tensor([row])
    got = correct(train, torch.zeros_like(train), ones(train), ones(train), level=level, mode=mode, bounds=bounds)
    assert got.weights.isfinite().all()
    assert got.veto.dropped.item() == any(not value >= LOG_VETO for value in row)
    assert got.veto.nan.item() == any(math.isnan(value) for value in row)
    if mode in (Mode.MIS, Mode.TIS):
        assert (got.weights <= 2).all()
        assert bounds is Bounds.UPPER or (got.weights[got.kept] >= 0.5).all()
    if got.veto.dropped:
        assert (got.weights == 0).all()


def test_denominators() -> None:
    assert denominator(Denominator.ALL, total=8, corrected=8, kept=5) == 8
    assert denominator(Denominator.KEPT, total=8, corrected=8, kept=5) == 5
    assert denominator(Denominator.KEPT, total=8, corrected=8, kept=0) == 0
    # Sequences without signal are neither kept nor rejected.
    assert denominator(Denominator.KEPT, total=64, corrected=8, kept=8) == 64
    assert denominator(Denominator.KEPT, total=64, corrected=8, kept=4) == 32
    assert denominator(Denominator.KEPT, total=64, corrected=0, kept=0) == 0
