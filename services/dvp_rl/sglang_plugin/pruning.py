"""Dynamic Vocabulary Pruning of a batch of logits, in place and on its device, without waiting for it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..dvp.policy import as_rows, constrain, split_rows

if TYPE_CHECKING:
    from jaxtyping import Float, Float32, Float64, Int

GRID = 1024
"""log(min_p) of a request is taken as a multiple of 1 / GRID if it is one but for rounding."""
ROUNDING = 2.0**-24
"""Half the spacing of float32 just above 1, so that log(float32(x)) is at most this far from log(x)."""


class Kept(NamedTuple):
    """What pruning left of each row."""

    kept_mass: Float[Tensor, "*batch"]
    """Full-softmax probability of the set."""
    kept_count: Int[Tensor, "*batch"]
    """Size of the set; 0 in a row that was not pruned: it has no min_p, or logits that are not finite."""


def read_log_min_p(min_ps: Float32[Tensor, "*batch"]) -> Float64[Tensor, "*batch"]:
    """log(min_p) as it was meant: SGLang keeps min_p in float32, where e^-13 becomes e^-12.99999998.

    Rounding may move the threshold by ROUNDING * temperature nats. Exact ties with a threshold are real (logits in
    bfloat16), so the round numbers that people choose, like -13, are restored exactly. 0 gives -inf: prunes nothing.
    """
    log_min_p = min_ps.double().log()
    meant = (log_min_p * GRID).round() / GRID
    return torch.where((log_min_p - meant).abs() <= ROUNDING, meant, log_min_p)


@torch.no_grad()
def prune(
    logits: Float[Tensor, "batch vocab"], min_ps: Float32[Tensor, "*batch"], temperatures: Float32[Tensor, "batch 1"]
) -> Kept:
    """Sets to -inf what is outside of the safe set of its row; writes nothing in rows with min_p 0.

    A row that is not finite has no set. It stays as it is, for SGLang to treat as it does without the plugin.
    """
    rows, threshold, tau = as_rows(logits, read_log_min_p(min_ps), temperatures.view(-1))
    masses, counts = [], []
    for block, limit, heat, asked in split_rows(rows, threshold, tau, (min_ps > 0).unsqueeze(-1)):
        policy = constrain(block, limit, heat)
        count = policy.keep.sum(-1, keepdim=True).int().mul_(asked)
        block.masked_fill_((count > 0) & (policy.keep == 0), -math.inf)
        masses.append(policy.kept / policy.total)
        counts.append(count)
    return Kept(torch.cat(masses).squeeze(-1), torch.cat(counts).squeeze(-1))
