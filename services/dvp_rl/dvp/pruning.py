"""Dynamic Vocabulary Pruning of a batch of logits, in place, on its device and without waiting for it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .policy import as_rows, membership, shift, split_rows

if TYPE_CHECKING:
    from jaxtyping import Float, Float32, Float64

GRID = 1024
"""log(min_p) of a request is taken as a multiple of 1 / GRID if it differs from one only by rounding."""
ROUNDING = 2.0**-24
"""Half the spacing of float32 just above 1, so that log(float32(x)) is at most this far from log(x)."""


def read_log_min_p(min_ps: Float32[Tensor, "*batch"]) -> Float64[Tensor, "*batch"]:
    """The intended log(min_p): servers keep min_p in float32, where e^-13 becomes e^-12.99999998.

    Rounding may move the threshold by ROUNDING * temperature nats. Exact ties with a threshold do occur (logits in
    bfloat16), so the round numbers that users choose, such as -13, are restored exactly. min_p 0 gives -inf, which
    prunes nothing.
    """
    log_min_p = min_ps.double().log()
    meant = (log_min_p * GRID).round() / GRID
    return torch.where((log_min_p - meant).abs() <= ROUNDING, meant, log_min_p)


@torch.no_grad()
def prune(
    logits: Float[Tensor, "batch vocab"], min_ps: Float32[Tensor, " batch"], temperatures: Float32[Tensor, "batch 1"]
) -> Float32[Tensor, "2 batch"]:
    """Sets logits outside the safe set of their row to -inf. Returns each row's kept mass and kept count, which
    float32 holds exactly below 2^24.

    A row with min_p 0, or with NaN or inf, has no set: it stays unchanged, with count 0 and a mass without meaning.
    Raises ValueError if the shapes do not match.
    """
    batch = len(logits)
    if min_ps.shape != (batch,) or temperatures.shape != (batch, 1):
        given = f"min_ps {tuple(min_ps.shape)} and temperatures {tuple(temperatures.shape)}"
        raise ValueError(f"{given} do not match logits {tuple(logits.shape)}: expected {(batch,)} and {(batch, 1)}")
    if logits.is_cuda and logits.dtype != torch.float64:
        from .pruning_cuda import prune_in_kernel

        return prune_in_kernel(logits, min_ps, temperatures)
    return prune_in_blocks(logits, min_ps, temperatures)


def prune_in_blocks(
    logits: Float[Tensor, "batch vocab"], min_ps: Float32[Tensor, " batch"], temperatures: Float32[Tensor, "batch 1"]
) -> Float32[Tensor, "2 batch"]:
    """`prune` in PyTorch."""
    rows, threshold, tau = as_rows(logits, read_log_min_p(min_ps), temperatures.view(-1))
    masses, counts = [], []
    for block, least, temperature, asked in split_rows(rows, threshold, tau, (min_ps > 0).unsqueeze(-1)):
        shifted = shift(block)
        keep = membership(shifted, least)
        count = keep.sum(-1).mul_(asked.squeeze(-1))
        weight = shifted.div_(temperature).softmax(-1)
        total = weight.sum(-1)  # 1, but for rounding: no mass exceeds 1 then
        masses.append(weight.mul_(keep).sum(-1).div_(total))
        counts.append(count)
        # +inf on S and in rows without a set, -inf off S: a CPU takes minimum many times faster than masked_fill.
        bound = keep.add_(count.eq(0).unsqueeze(-1)).sub_(0.5).mul_(math.inf)
        torch.minimum(block, bound.to(block.dtype), out=block)
    return torch.stack((torch.cat(masses).float(), torch.cat(counts).float()))
