"""Delta by bucket, its prediction and its bounds, on logits whose noise is known."""

from __future__ import annotations

import math

import pytest
import torch

from dvp_lab.mismatch import EDGES, Mismatch, exact_range, first_order_bound, half_range, measure
from dvp_lab.sources import Samples, Trace

N, T, V = 48, 24, 200
EVERY = len(EDGES) - 1


def trace(train: torch.Tensor, infer: torch.Tensor, mask: torch.Tensor | None = None) -> Trace:
    """A trace whose tokens are drawn from `infer`."""
    torch.manual_seed(1)
    tokens = torch.distributions.Categorical(logits=infer).sample()
    logprobs = infer.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    return Trace(Samples(tokens, mask, logprobs, infer), train)


def contexts(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Logits of peaked and of diffuse contexts."""
    torch.manual_seed(0)
    return torch.randn(N, T, V, dtype=dtype) * torch.linspace(1, 4, T, dtype=dtype)[:, None]


@pytest.mark.parametrize("s", [0.02, 0.1])
def test_the_prediction_is_met_on_gaussian_noise(s: float) -> None:
    train = contexts()
    found = measure([trace(train, train + s * torch.randn_like(train))])
    assert found.s == pytest.approx(s, rel=0.01)
    assert found.s_of_kl == pytest.approx(s, rel=0.03)
    buckets = [bucket for _, bucket in found.buckets()]
    assert len(buckets) >= 7
    assert all(bucket.is_met for bucket in buckets)
    tail = found.bucket(0, 5)
    assert abs(tail.contrast.value - tail.predicted_contrast) <= tail.contrast.error
    assert tail.contrast.error < 0.1 * abs(tail.contrast.value), "the interval is narrow enough to decide"
    assert tail.contrast.high < 0


def test_other_noise_does_not_meet_it() -> None:
    """Noise that moves the whole tail together is not iid and misses the prediction."""
    train = contexts()
    rare = train.softmax(-1) < 1e-3
    shift = 0.1 * torch.randn(N, T, 1, dtype=torch.float64) + 0.1
    found = measure([trace(train, train + shift * rare)])
    assert not found.bucket(0, 5).is_met


def noises() -> dict[str, torch.Tensor]:
    train = contexts()
    likely = train == train.amax(-1, keepdim=True)
    return {
        "gaussian": 0.5 * torch.randn_like(train),
        "heavy tails": 0.05 * torch.distributions.StudentT(2.0).sample(train.shape).double(),
        "against the likeliest": torch.where(likely, -0.5, 0.5).double(),
        "for the likeliest": torch.where(likely, 0.5, -0.5).double(),
        "none": torch.zeros_like(train),
        "a shift that no policy sees": torch.full_like(train, 3.0),
    }


@pytest.mark.parametrize("name", list(noises()))
def test_the_exact_range_and_the_order_hold_for_any_noise(name: str) -> None:
    train, noise = contexts(), noises()[name]
    found = measure([trace(train, train + noise)])
    every = found.bucket(0, EVERY)
    assert every.tokens == N * T * V
    assert every.beyond_exact == 0
    assert all(bucket.is_ordered for _, bucket in found.buckets())


def test_the_first_order_bound_is_exceeded_on_its_upper_side() -> None:
    """The excess is about 2 eps^2 p (1 - p) if all noise goes against one likely token."""
    train, noise = contexts(), noises()["against the likeliest"]
    found = measure([trace(train, train + noise)])
    assert found.bucket(0, EVERY).beyond_first_order > 0
    p, eps = torch.tensor(0.6), torch.tensor(0.1)
    low, high = exact_range(p, eps)
    bound = first_order_bound(p, eps)
    assert -low <= bound < high
    assert float(high - bound) == pytest.approx(2 * 0.1**2 * 0.6 * 0.4, rel=0.1)


def test_sums_over_a_bucket_are_those_of_the_definition() -> None:
    train = contexts()
    infer = train + 0.3 * torch.randn_like(train)
    mask = torch.rand(N, T) < 0.7
    found = measure([trace(train[:20], infer[:20], mask[:20]), trace(train[20:], infer[20:], mask[20:])])
    p, q = train[mask].softmax(-1), infer[mask].softmax(-1)
    delta, inside = p.log() - q.log(), (p >= EDGES[4]) & (p < EDGES[5])
    bucket = found.bucket(4, 5)
    assert found.num_tokens == int(mask.sum())
    assert bucket.tokens == int(inside.sum())
    assert bucket.sampled.value == pytest.approx(float((q * delta)[inside].sum() / q[inside].sum()))
    assert bucket.control.value == pytest.approx(float((p * delta)[inside].sum() / p[inside].sum()))
    assert bucket.middle == pytest.approx(math.log(float(p[inside].sum() / q[inside].sum())))
    assert bucket.contrast.value == pytest.approx(bucket.sampled.value - bucket.control.value)
    assert found.kl_token == pytest.approx(float(-(q * delta).sum(-1).mean()))
    assert (found.delta[~mask] == 0).all()


def test_the_half_range_is_blind_to_what_no_policy_sees() -> None:
    eps = torch.tensor([[0.1, -0.3, 0.2], [5.1, 4.7, 5.2]], dtype=torch.float64)
    assert half_range(eps).flatten().tolist() == pytest.approx([0.25, 0.25])


def test_the_interval_shrinks_with_the_number_of_sequences() -> None:
    train = contexts()
    infer = train + 0.1 * torch.randn_like(train)

    def error(found: Mismatch) -> float:
        return found.bucket(0, 5).sampled.error

    few, many = measure([trace(train[:12], infer[:12])]), measure([trace(train, infer)])
    assert error(many) == pytest.approx(error(few) / 2, rel=0.5)
