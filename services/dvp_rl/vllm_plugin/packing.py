"""Kept mass and kept count of a token as one integer: vLLM sends a rank with each sampled token, and nothing else that
could carry them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float32, Int64

BITS = 32
"""The lower bits are those of the mass, a float32."""


class Kept(NamedTuple):
    mass: float
    num: int


def pack(kept: Float32[Tensor, "2 batch"]) -> Int64[Tensor, " batch"]:
    """`kept`: the result of `prune`. 0 for a row without a set."""
    mass, count = kept
    packed = (count.long() << BITS) | mass.contiguous().view(torch.int32).long()
    return torch.where(count > 0, packed, 0)


def unpack(rank: int) -> Kept:
    return Kept(float(np.uint32(rank & (1 << BITS) - 1).view(np.float32)), rank >> BITS)
