"""Dynamic Vocabulary Pruning of a batch of logits, in place, on its device and without waiting for it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..dvp.policy import as_rows, constrain, split_rows

if TYPE_CHECKING:
    from jaxtyping import Float, Float32, Float64, Int

GRID = 1024
"""log(min_p) of a request is taken as a multiple of 1 / GRID if it differs from one only by rounding."""
ROUNDING = 2.0**-24
"""Half the spacing of float32 just above 1, so that log(float32(x)) is at most this far from log(x)."""


class Kept(NamedTuple):
    """The result of pruning, per row."""

    kept_mass: Float[Tensor, "*batch"]
    """Full-softmax probability of the set."""
    kept_count: Int[Tensor, "*batch"]
    """Size of the set; 0 if the row was not pruned, because it has no min_p, or NaN or inf in its logits."""


def read_log_min_p(min_ps: Float32[Tensor, "*batch"]) -> Float64[Tensor, "*batch"]:
    """The intended log(min_p): SGLang keeps min_p in float32, where e^-13 becomes e^-12.99999998.

    Rounding may move the threshold by ROUNDING * temperature nats. Exact ties with a threshold do occur (logits in
    bfloat16), so the round numbers that users choose, such as -13, are restored exactly. min_p 0 gives -inf, which
    prunes nothing.
    """
    log_min_p = min_ps.double().log()
    meant = (log_min_p * GRID).round() / GRID
    return torch.where((log_min_p - meant).abs() <= ROUNDING, meant, log_min_p)


@torch.no_grad()
def prune(
    logits: Float[Tensor, "batch vocab"], min_ps: Float32[Tensor, "*batch"], temperatures: Float32[Tensor, "batch 1"]
) -> Kept:
    """Sets logits outside the safe set of their row to -inf; writes nothing in rows with min_p 0.

    A row with NaN or inf has no set. It stays unchanged, and SGLang treats it as without the plugin.
    """
    rows, threshold, tau = as_rows(logits, read_log_min_p(min_ps), temperatures.view(-1))
    masses, counts = [], []
    for block, *rule, asked in split_rows(rows, threshold, tau, (min_ps > 0).unsqueeze(-1)):
        policy = constrain(block, *rule)
        count = policy.keep.sum(-1, keepdim=True).int().mul_(asked)
        block.masked_fill_((count > 0) & (policy.keep == 0), -math.inf)
        masses.append(policy.kept / policy.total)
        counts.append(count)
    return Kept(torch.cat(masses).squeeze(-1), torch.cat(counts).squeeze(-1))
