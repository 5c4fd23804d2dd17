"""Emulated low precision: values are rounded to a format, and computation stays in the model's own dtype.

Low-precision engines differ from a trainer in that their weights or KV cache are rounded. This error depends on the
state and persists along a sequence; unlike fresh noise, it does not average out.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache


class Format(StrEnum):
    BFLOAT16 = "bf16"
    FP8 = "fp8"
    """e4m3, with 3 mantissa bits."""
    INT8 = "int8"
    INT4 = "int4"


MAX_FP8 = 448.0


def rounded(values: Tensor, format: Format) -> Tensor:
    """The nearest values that `format` can represent. fp8 and integers have one scale per row (last axis), as quantised
    weights have one per output channel."""
    match format:
        case Format.BFLOAT16:
            return values.bfloat16().to(values.dtype)
        case Format.FP8:
            scale = _largest(values) / MAX_FP8
            return (values / scale).to(torch.float8_e4m3fn).to(values.dtype) * scale
        case Format.INT8 | Format.INT4:
            scale = _largest(values) / (127 if format is Format.INT8 else 7)
            return (values / scale).round() * scale


def _largest(values: Tensor) -> Tensor:
    tiny = torch.finfo(values.dtype).tiny
    return values.abs().amax(-1, keepdim=True).clamp(min=tiny)


@torch.no_grad()
def round_weights(model: Any, format: Format) -> None:
    """Rounds every linear layer in place, except the LM head, which engines leave alone as well."""
    head = model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module is not head:
            module.weight.copy_(rounded(module.weight, format))


class RoundedCache(DynamicCache):  # type: ignore[misc]
    """A KV cache of keys and values rounded by `round_cell`; the prompt's attention sees the rounded ones, too."""

    def __init__(self, round_cell: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._round_cell = round_cell

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        cells = self._round_cell(key_states), self._round_cell(value_states)
        found: tuple[Tensor, Tensor] = super().update(*cells, layer_idx, *args, **kwargs)
        return found
