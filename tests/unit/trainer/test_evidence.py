"""What pruning removed, against logits of both sides."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dvp_rl.dvp.policy import constrained_logprobs, full_logprobs
from dvp_trainer.learn.evidence import Evidence, pruning_metrics

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
    return Evidence(
        rows=torch.arange(len(tokens)),
        mask=mask,
        train_logprobs=own.logprobs,
        infer_logprobs=theirs.logprobs,
        inside=own.inside,
        train_kept_mass=own.kept_mass,
        train_kept_count=own.kept_count,
        infer_kept_mass=theirs.kept_mass,
        infer_kept_count=theirs.kept_count,
    )


def test_full_logprobs_are_those_of_the_whole_softmax(sides: tuple[torch.Tensor, ...]) -> None:
    train, infer, tokens = sides
    seen = evidence(train, infer, tokens)
    inside = seen.mask & seen.inside
    assert not inside[seen.mask].all(), "the case has outside tokens"
    metrics = pruning_metrics(seen)
    for side, logits, constrained in (("train", train, seen.train_logprobs), ("infer", infer, seen.infer_logprobs)):
        full = full_logprobs(logits, tokens, temperature=1.0)
        assert metrics[f"logprob/{side}_full"] == pytest.approx(float(full[inside].mean()), abs=1e-12)
        assert metrics[f"logprob/{side}_constrained"] == pytest.approx(float(constrained[inside].mean()), abs=1e-12)
    gap = metrics["logprob/infer_full"] - metrics["logprob/train_full"]
    assert metrics["mismatch/kl_unmasked"] == pytest.approx(gap, abs=1e-12)


def test_without_a_token_inside_there_is_no_mean(sides: tuple[torch.Tensor, ...]) -> None:
    seen = evidence(*sides)
    metrics = pruning_metrics(replace(seen, inside=torch.zeros_like(seen.inside)))
    assert metrics.keys() == {"pruned/share", "pruned/mass", "entropy/constrained"}
