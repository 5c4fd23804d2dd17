"""The record of both sides, and metrics of what pruning removed, against the logits of both sides."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dvp_rl.dvp.correction import correct
from dvp_rl.dvp.evidence import Evidence
from dvp_rl.dvp.metrics import MetricBatch, mismatch_metrics
from dvp_rl.dvp.options import Level
from dvp_rl.dvp.policy import constrained_logprobs, full_logprobs

LOG_MIN_P = -2.0


@pytest.fixture
def sides() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two sides' logits [4, 5, V] that differ by noise, and tokens drawn from the second under its own set."""
    torch.manual_seed(0)
    train = 2 * torch.randn(4, 5, 30, dtype=torch.float64)
    infer = train + 0.3 * torch.randn_like(train)
    keep = infer - infer.amax(-1, keepdim=True) >= LOG_MIN_P
    drawn = torch.distributions.Categorical(logits=infer.masked_fill(~keep, -torch.inf)).sample()
    return train, infer, drawn


def evidence(train: torch.Tensor, infer: torch.Tensor, tokens: torch.Tensor) -> Evidence:
    own, theirs = (constrained_logprobs(z, tokens, log_min_p=LOG_MIN_P, temperature=1.0) for z in (train, infer))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, 3:] = False
    return Evidence(torch.arange(len(tokens)), mask, own, theirs)


def metrics(seen: Evidence) -> dict[str, float]:
    n = len(seen.rows)
    correction = correct(seen.train.logprobs, seen.infer.logprobs, seen.train.inside, seen.mask)
    return mismatch_metrics(MetricBatch(seen, torch.ones(n), torch.ones(n), correction, Level.SEQUENCE, 2.0))


def test_full_logprobs_are_those_of_the_whole_softmax(sides: tuple[torch.Tensor, ...]) -> None:
    train, infer, tokens = sides
    seen = evidence(train, infer, tokens)
    inside = seen.mask & seen.train.inside
    assert not inside[seen.mask].all(), "the case has outside tokens"
    got = metrics(seen)
    for name, logits, side in (("train", train, seen.train), ("infer", infer, seen.infer)):
        full = full_logprobs(logits, tokens, temperature=1.0)
        assert got[f"logprob/{name}_full"] == pytest.approx(float(full[inside].mean()), abs=1e-12)
        assert got[f"logprob/{name}_constrained"] == pytest.approx(float(side.logprobs[inside].mean()), abs=1e-12)
    gap = got["logprob/infer_full"] - got["logprob/train_full"]
    assert got["mismatch/kl_unmasked"] == pytest.approx(gap, abs=1e-12)


def test_without_a_token_inside_there_is_no_mean(sides: tuple[torch.Tensor, ...]) -> None:
    seen = evidence(*sides)
    got = metrics(replace(seen, train=seen.train._replace(inside=torch.zeros_like(seen.train.inside))))
    assert {"pruned/share", "pruned/mass", "entropy/constrained"} <= got.keys()
    assert not any(name.startswith("logprob/") or name == "mismatch/kl_unmasked" for name in got)


def test_parts_join_in_the_order_of_the_batch_without_rows_that_have_no_token(sides: tuple[torch.Tensor, ...]) -> None:
    """Micro-batches arrive in any order and with any padding; idle ones have no model token."""
    whole = evidence(*sides)
    short = Evidence.of(
        {name: tensor[2:, ..., :4] if tensor.dim() > 1 else tensor[2:] for name, tensor in whole.tensors().items()}
    )
    first = Evidence.of({name: tensor[:2] for name, tensor in whole.tensors().items()})
    idle = replace(first, mask=torch.zeros_like(first.mask))
    joined = Evidence.join([short, idle, first])
    assert joined.rows.tolist() == [0, 1, 2, 3]
    assert joined.mask.sum(1).tolist() == [3, 5, 4, 4]
    for name, tensor in joined.tensors().items():
        expected = whole.tensors()[name]
        same = tensor == expected if tensor.dim() == 1 else (tensor == expected)[joined.mask]
        assert same.all(), name
