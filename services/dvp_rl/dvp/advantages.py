"""Advantages of a batch of groups.

Shapes: G groups of n samples. Rewards [G, n] give advantages [G, n] of the same dtype. A group of n > 1 whose counted
rewards are all equal has advantages of exactly 0.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

import torch

from .options import Baseline

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

log = logging.getLogger(__name__)

STD_EPS = 1e-6


def advantages(
    rewards: Float[Tensor, "G n"],
    baseline: Baseline = Baseline.RLOO,
    *,
    counted: Bool[Tensor, "G n"] | None = None,
    weights: Float[Tensor, "G n"] | None = None,
) -> Float[Tensor, "G n"]:
    """Advantages of each sample. Rewards must be finite.

    `counted`: samples that take part in the baseline (default: all); an uncounted sample has advantage 0.
    `weights`: importance weights for RLOO_WEIGHTED, 0 where rejected.
    """
    counted = torch.ones_like(rewards, dtype=torch.bool) if counted is None else counted
    if rewards.shape[1] == 1:
        _warn_single()
    match baseline:
        case Baseline.RLOO:
            raw = rewards - others_mean(rewards, counted.to(rewards))
        case Baseline.RLOO_WEIGHTED:
            assert weights is not None, "rloo_weighted needs importance weights"
            raw = rewards - weighted_others_mean(rewards, torch.where(counted, weights.to(rewards), 0), counted)
        case Baseline.GRPO | Baseline.GRPO_STD:
            raw = rewards - group_mean(rewards, counted)
            raw = raw / (group_std(rewards, counted) + STD_EPS) if baseline is Baseline.GRPO_STD else raw
    # Rounding leaves tiny residues where the exact result is 0.
    return torch.where(counted & ~uniform_groups(rewards, counted)[:, None], raw, 0)


def others_mean(rewards: Float[Tensor, "G n"], weights: Float[Tensor, "G n"]) -> Float[Tensor, "G n"]:
    """b_i = sum_{j != i} w_j R_j / sum_{j != i} w_j; 0 where all other weights are 0, so a group of one has A = R.

    The sums omit i instead of subtracting it, so that one huge weight does not cost the others precision.
    """
    leave_one_out = 1 - torch.eye(rewards.shape[1], dtype=rewards.dtype, device=rewards.device)
    total = weights @ leave_one_out
    return torch.where(
        total > 0, (weights * rewards) @ leave_one_out / total.clamp_min(torch.finfo(total.dtype).tiny), 0
    )


def weighted_others_mean(
    rewards: Float[Tensor, "G n"], weights: Float[Tensor, "G n"], counted: Bool[Tensor, "G n"]
) -> Float[Tensor, "G n"]:
    """The w-weighted mean over the kept others. If no other was kept, the plain mean over the counted others, not 0."""
    none_kept = (weights > 0).sum(1, keepdim=True) - (weights > 0).to(torch.long) == 0
    return torch.where(none_kept, others_mean(rewards, counted.to(rewards)), others_mean(rewards, weights))


def group_mean(rewards: Float[Tensor, "G n"], counted: Bool[Tensor, "G n"]) -> Float[Tensor, "G 1"]:
    return torch.where(counted, rewards, 0).sum(1, keepdim=True) / counted.sum(1, keepdim=True).clamp_min(1)


def group_std(rewards: Float[Tensor, "G n"], counted: Bool[Tensor, "G n"]) -> Float[Tensor, "G 1"]:
    """Standard deviation with Bessel's correction, as in verl and TRL; 0 for a group of one."""
    squares = torch.where(counted, rewards - group_mean(rewards, counted), 0).square().sum(1, keepdim=True)
    return (squares / (counted.sum(1, keepdim=True) - 1).clamp_min(1)).sqrt()


def uniform_groups(rewards: Float[Tensor, "G n"], counted: Bool[Tensor, "G n"] | None = None) -> Bool[Tensor, " G"]:
    """Groups without signal: all counted rewards are equal, or none is counted. A counted group of one has signal."""
    counted = torch.ones_like(rewards, dtype=torch.bool) if counted is None else counted
    lowest = torch.where(counted, rewards, torch.inf).amin(1)
    highest = torch.where(counted, rewards, -torch.inf).amax(1)
    return ~counted.any(1) | ((lowest == highest) & (rewards.shape[1] > 1))


@cache
def _warn_single() -> None:
    log.warning(
        "groups of one sample have no others for a baseline, so A = R (0 with grpo), and rewards of one sign push only "
        "one way; sample at least 2 per prompt"
    )
