"""`prune` on a GPU in one Triton kernel: it reads each logit twice and writes it once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .pruning import GRID, ROUNDING

if TYPE_CHECKING:
    from jaxtyping import Float, Float32

BLOCK, WARPS = 8192, 16
"""Logits that a row's program takes at a time, and its warps."""


def prune_in_kernel(
    logits: Float[Tensor, "batch vocab"],
    min_ps: Float32[Tensor, " batch"],
    temperatures: Float32[Tensor, "batch 1"],
) -> Float32[Tensor, "2 batch"]:
    """`prune` on a GPU, for logits in float32 or less. It waits for nothing."""
    batch, vocab = logits.shape
    kept = min_ps.new_empty(2, batch)
    if batch:
        with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call] # where Triton launches
            _prune_kernel[(batch,)](
                *(logits, *logits.stride(), min_ps.contiguous(), temperatures.contiguous(), kept, vocab),
                GRID=GRID,
                ROUNDING=ROUNDING,
                BLOCK=BLOCK,
                num_warps=WARPS,
            )
    return kept


@triton.jit  # type: ignore[untyped-decorator]
def _prune_kernel(  # type: ignore[no-untyped-def]
    logits,
    row_stride,
    stride,
    min_ps,
    temperatures,
    kept_values,
    vocab,
    GRID: tl.constexpr,
    ROUNDING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each row: its largest logit, then its set, as `read_log_min_p` and `constrain` define it."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    min_p, tau = tl.load(min_ps + row), tl.load(temperatures + row)
    lane = tl.arange(0, BLOCK)
    peak = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, vocab, BLOCK):
        column = first + lane
        z = tl.load(logits + column * stride, column < vocab, float("-inf")).to(tl.float32)
        peak = tl.where((z > peak) | (z != z), z, peak)  # NaN stays
    has_nan = tl.max((peak != peak).to(tl.int32), 0) > 0
    largest = tl.max(tl.where(peak == peak, peak, float("-inf")), 0)
    total, kept, count = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    if (min_p > 0) & (has_nan == 0) & (largest - largest == 0):
        log_min_p = tl.log(min_p.to(tl.float64))
        meant = tl.floor(log_min_p * GRID + 0.5) / GRID
        log_min_p = tl.where(tl.abs(log_min_p - meant) <= ROUNDING, meant, log_min_p)
        threshold = (tau.to(tl.float64) * log_min_p).to(tl.float32)
        for first in range(0, vocab, BLOCK):
            column = first + lane
            there = column < vocab
            z = tl.load(logits + column * stride, there, float("-inf")).to(tl.float32)
            shifted = z - largest
            keep = (shifted >= threshold) & there
            weight = tl.exp(shifted / tau)
            total += weight
            kept += tl.where(keep, weight, 0.0)
            count += keep.to(tl.int32)
            tl.store(logits + column * stride, tl.where(keep, z, float("-inf")), there)
    tl.store(kept_values + row, tl.sum(kept, 0) / tl.sum(total, 0))
    tl.store(kept_values + tl.num_programs(0) + row, tl.sum(count, 0).to(tl.float32))
