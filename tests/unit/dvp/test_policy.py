"""The constrained policy against a float64 oracle, at ties, shifts and in low precision."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dvp_rl.dvp.policy import Constrained, constrained_logprobs, entropy, full_logprobs, safe_set
from tests.unit.dvp import oracle

TEMPERATURES = (0.7, 1.0, 1.3)
LOG_MIN_PS = (-13.0, -6.0, math.log(0.1))
SHIFTS = (0.0, 100.0, -100.0)
TOLERANCE = 5e-5


def make_logits(rows: int, vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Random logits, spread so widely that every threshold prunes."""
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 5).to(dtype)


def as_numpy(logits: Tensor) -> np.ndarray:
    return (logits if logits.dtype == torch.float64 else logits.float()).detach().cpu().numpy()


def assert_agrees(logits: Tensor, log_min_p: float, temperature: float) -> None:
    """Compares set, count, mass and the log-prob of every token, member or not, with the oracle."""
    expected = oracle.policy(as_numpy(logits), log_min_p, temperature)
    vocab = logits.shape[-1]
    ids = torch.arange(vocab, device=logits.device).repeat(len(logits), 1)
    wide = logits.unsqueeze(1).expand(-1, vocab, -1)
    got = constrained_logprobs(wide, ids, log_min_p=log_min_p, temperature=temperature)
    keep = safe_set(logits, log_min_p=log_min_p, temperature=temperature)
    assert np.array_equal(keep.cpu().numpy(), expected.keep)
    assert torch.equal(got.inside, keep)
    got = Constrained(*(output.cpu() for output in got))
    stand_in = np.where(expected.keep, expected.logprobs, expected.outside_logprob[:, None])
    np.testing.assert_allclose(got.logprobs.numpy(), stand_in, atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(got.kept_mass[:, 0].numpy(), expected.kept_mass, atol=1e-6)
    assert np.array_equal(got.kept_count[:, 0].numpy(), expected.kept_count)


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("log_min_p", LOG_MIN_PS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_agrees_with_the_oracle(
    device: torch.device, dtype: torch.dtype, temperature: float, log_min_p: float, shift: float
) -> None:
    logits = (make_logits(16, 101) + shift).to(device, dtype)
    assert_agrees(logits, log_min_p, temperature)
    assert not safe_set(logits, log_min_p=log_min_p, temperature=temperature).all()


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("log_min_p", [-13.0, -6.0])
def test_exact_ties_at_the_threshold_are_members(
    device: torch.device, log_min_p: float, temperature: float, shift: float
) -> None:
    edge = temperature * log_min_p
    tail = edge + torch.arange(-8, 9).repeat(40) / 2  # a grid that bf16 holds at any of these shifts
    logits = (torch.cat([torch.zeros(1), tail]) + shift).to(device, torch.bfloat16).unsqueeze(0)
    gap = logits.double() - logits.double().max()
    assert (gap == edge).sum() == 40
    keep = safe_set(logits, log_min_p=log_min_p, temperature=temperature)
    assert torch.equal(keep, gap >= edge)
    assert_agrees(logits, log_min_p, temperature)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("log_min_p", LOG_MIN_PS)
def test_threshold_is_the_float64_product_rounded_once(
    device: torch.device, log_min_p: float, temperature: float
) -> None:
    edge = np.float32(np.float64(temperature) * np.float64(log_min_p))
    neighbours = [np.nextafter(edge, np.float32(-99)), edge, np.nextafter(edge, np.float32(0))]
    logits = torch.tensor([0.0, *neighbours], device=device)
    keep = safe_set(logits, log_min_p=log_min_p, temperature=temperature)
    assert keep.tolist() == [True, False, True, True]


def test_float32_set_differs_from_float64_only_in_the_rounding_band() -> None:
    logits = make_logits(64, 4001, torch.float64)
    exact = safe_set(logits, log_min_p=-6.0, temperature=0.7)
    single = safe_set(logits.float(), log_min_p=-6.0, temperature=0.7)
    distance = ((logits - logits.amax(-1, keepdim=True)) / 0.7 + 6.0).abs()
    assert distance[exact != single].numel() == 0 or distance[exact != single].max() < 1e-5


def test_rows_may_have_their_own_settings(device: torch.device) -> None:
    logits = make_logits(12, 50).view(4, 3, 50).to(device)
    ids = logits.argsort(-1)[..., -2]
    temperature = torch.tensor(TEMPERATURES, dtype=torch.float64, device=device)
    log_min_p = torch.tensor([-1.0, -3.0, -6.0, -13.0], dtype=torch.float64, device=device).unsqueeze(-1)
    got = constrained_logprobs(logits, ids, log_min_p=log_min_p, temperature=temperature)
    keep = safe_set(logits, log_min_p=log_min_p, temperature=temperature)
    for i, j in np.ndindex(4, 3):
        one = {"log_min_p": float(log_min_p[i]), "temperature": TEMPERATURES[j]}
        alone = constrained_logprobs(logits[i, j], ids[i, j], **one)
        for name, value in alone._asdict().items():
            torch.testing.assert_close(getattr(got, name)[i, j], value)
        assert torch.equal(keep[i, j], safe_set(logits[i, j], **one))


@pytest.mark.parametrize("leading", [(), (0,), (2, 0), (3,), (2, 1, 3)])
def test_any_leading_shape(leading: tuple[int, ...]) -> None:
    logits = torch.randn(*leading, 7, requires_grad=True)
    ids = torch.zeros(leading, dtype=torch.long)
    got = constrained_logprobs(logits, ids, log_min_p=-2.0, temperature=1.0)
    assert all(output.shape == leading for output in got)
    got.logprobs.sum().backward()
    assert logits.grad is not None
    assert logits.grad.shape == logits.shape
    assert safe_set(logits, log_min_p=-2.0, temperature=1.0).shape == logits.shape
    assert entropy(logits, log_min_p=-2.0, temperature=1.0).shape == leading
    assert full_logprobs(logits, ids, temperature=1.0).shape == leading


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_gradient_is_that_of_the_masked_softmax(device: torch.device, temperature: float) -> None:
    logits = make_logits(300, 2001, torch.float64).to(device).requires_grad_()  # several blocks of rows on a CPU
    slope = torch.randn(300, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(device)
    keep = safe_set(logits, log_min_p=-6.0, temperature=temperature)
    ids = keep.int().argmax(-1)  # the first member, likely or not
    plain = (logits / temperature).masked_fill(~keep, -math.inf).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    got = constrained_logprobs(logits, ids, log_min_p=-6.0, temperature=temperature)
    (expected,) = torch.autograd.grad((plain * slope).sum(), logits)
    (gradient,) = torch.autograd.grad((got.logprobs * slope).sum(), logits)
    torch.testing.assert_close(got.logprobs, plain)
    torch.testing.assert_close(gradient, expected, atol=1e-14, rtol=1e-12)
    assert got.inside.all()
    assert not keep.all()


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("log_min_p", [-13.0, -30.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_outside_token_is_finite_and_flagged(dtype: torch.dtype, log_min_p: float, shift: float) -> None:
    logits = torch.zeros(3, 11)
    logits[:, 1:] = -torch.arange(1.0, 11.0)
    logits[:, 10] = log_min_p - 4
    logits = (logits + shift).to(dtype).requires_grad_()
    ids = torch.tensor([10, 0, 10])
    got = constrained_logprobs(logits, ids, log_min_p=log_min_p, temperature=1.0)
    got.logprobs.sum().backward()
    assert got.inside.tolist() == [False, True, False]
    expected = oracle.policy(as_numpy(logits), log_min_p, 1.0).outside_logprob
    np.testing.assert_allclose(got.logprobs[[0, 2]].detach().numpy(), expected[[0, 2]], atol=TOLERANCE)
    assert (got.logprobs[[0, 2]] <= -50).all()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert (logits.grad[[0, 2]] == 0).all()
    assert (logits.grad[1] != 0).any()


@pytest.mark.parametrize("log_min_p", [-6.0, -math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_shows_as_nan_and_has_no_gradient(bad: float, log_min_p: float) -> None:
    logits = make_logits(2, 9)
    logits[0, 4] = bad
    logits.requires_grad_()
    token_ids = torch.tensor([1, int(logits[1].argmax())])
    got = constrained_logprobs(logits, token_ids, log_min_p=log_min_p, temperature=1.0)
    got.logprobs.sum().backward()
    assert got.logprobs.isnan().tolist() == [True, False]
    assert got.inside.tolist() == [False, True]
    assert got.kept_count[0] == 0
    assert logits.grad is not None
    assert (logits.grad[0] == 0).all()
    assert (logits.grad[1] != 0).any()


def test_minus_infinity_is_a_token_of_probability_zero() -> None:
    logits = torch.tensor([[0.0, -1.0, -math.inf]], requires_grad=True)
    got = constrained_logprobs(logits, torch.tensor([1]), log_min_p=-6.0, temperature=1.0)
    got.logprobs.sum().backward()
    torch.testing.assert_close(got.logprobs, logits.detach()[:, :2].log_softmax(-1)[:, 1])
    assert got.kept_count.item() == 2
    assert logits.grad is not None
    assert logits.grad[0, 2] == 0


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_full_logprobs_and_entropies(temperature: float) -> None:
    logits = make_logits(8, 60, torch.float64)
    ids = torch.arange(8)
    expected = (logits / temperature).log_softmax(-1)
    got = full_logprobs(logits, ids, temperature=temperature)
    torch.testing.assert_close(got, expected.gather(-1, ids[:, None])[:, 0])
    full = entropy(logits, log_min_p=-math.inf, temperature=temperature)
    torch.testing.assert_close(full, -(expected.exp() * expected).sum(-1))
    pruned = oracle.policy(logits.numpy(), -3.0, temperature)
    plogp = np.where(pruned.keep, np.exp(pruned.logprobs) * np.where(pruned.keep, pruned.logprobs, 0.0), 0.0)
    got = entropy(logits, log_min_p=-3.0, temperature=temperature)
    np.testing.assert_allclose(got.numpy(), -plogp.sum(-1), atol=1e-12)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_temperature_must_be_positive(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        safe_set(torch.zeros(2, 3), log_min_p=-13.0, temperature=temperature)


@pytest.mark.parametrize("log_min_p", [0.1, math.nan])
def test_min_p_must_be_at_most_one(log_min_p: float) -> None:
    with pytest.raises(ValueError, match="log_min_p"):
        safe_set(torch.zeros(2, 3), log_min_p=log_min_p, temperature=1.0)


def test_shapes_must_match() -> None:
    with pytest.raises(ValueError, match="token_ids"):
        constrained_logprobs(torch.zeros(2, 3), torch.zeros(3, dtype=torch.long), log_min_p=-13.0, temperature=1.0)


logit_rows = st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=30)
log_min_ps = st.floats(-30, 0)
temperatures = st.floats(0.1, 5)


@settings(max_examples=150, deadline=None)
@given(logit_rows, log_min_ps, temperatures)
def test_mass_sums_to_one_over_the_set_and_holds_the_argmax(
    row: list[float], log_min_p: float, temperature: float
) -> None:
    logits = torch.tensor(row)
    keep = safe_set(logits, log_min_p=log_min_p, temperature=temperature)
    ids = torch.arange(len(row))
    wide = logits.expand(len(row), -1)
    got = constrained_logprobs(wide, ids, log_min_p=log_min_p, temperature=temperature)
    assert keep[logits == logits.max()].all()
    assert torch.equal(got.inside, keep)
    assert float(got.logprobs[keep].exp().sum()) == pytest.approx(1.0, abs=1e-5)
    assert (got.logprobs[keep] <= 0).all()
    assert (got.logprobs[~keep] <= -50).all()
    assert ((got.kept_mass > 0) & (got.kept_mass <= 1)).all()
    assert (got.kept_count == keep.sum()).all()
    assert (entropy(logits, log_min_p=log_min_p, temperature=temperature) >= 0).all()


@settings(max_examples=150, deadline=None)
@given(logit_rows, st.floats(-100, 100, width=32), log_min_ps, temperatures)
def test_a_shift_moves_the_set_only_inside_the_rounding_band(
    row: list[float], shift: float, log_min_p: float, temperature: float
) -> None:
    logits = torch.tensor(row)
    here = safe_set(logits, log_min_p=log_min_p, temperature=temperature)
    there = safe_set(logits + shift, log_min_p=log_min_p, temperature=temperature)
    distance = (logits.double() - logits.double().max() - temperature * log_min_p).abs()
    assert (distance[here != there] < 1e-4).all()
