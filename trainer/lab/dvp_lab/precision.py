"""Low precision. Emulated: values are rounded to a format, and computation stays in the model's own dtype. Real: fp8
matrix products, as inference engines compute them with `--quantization fp8`.

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

from dvp_rl.contract.errors import ConfigError

from .engines import Engine


class Format(StrEnum):
    BFLOAT16 = "bf16"
    FP8 = "fp8"
    """e4m3, with 3 mantissa bits."""
    INT8 = "int8"
    INT4 = "int4"


MAX_FP8 = 448.0
FP8_MULTIPLE = 16
"""Both sides of a weight matrix must be multiples of this for an fp8 product."""


def rounded(values: Tensor, format: Format) -> Tensor:
    """The nearest values that `format` can represent. fp8 and integers have one scale per row (last axis), as quantised
    weights have one per output channel."""
    match format:
        case Format.BFLOAT16:
            return values.bfloat16().to(values.dtype)
        case Format.FP8:
            codes, scale = _in_fp8(values)
            return codes.to(values.dtype) * scale
        case Format.INT8 | Format.INT4:
            scale = _largest(values) / (127 if format is Format.INT8 else 7)
            return (values / scale).round() * scale


def _in_fp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 values, and the scale of each row."""
    scale = _largest(values) / MAX_FP8
    return (values / scale).to(torch.float8_e4m3fn), scale


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


def multiplies_fp8(device: torch.device) -> bool:
    """Whether PyTorch has fp8 matrix products with a scale per row and column on the device."""
    one = torch.ones(FP8_MULTIPLE, FP8_MULTIPLE, dtype=torch.bfloat16, device=device)
    try:
        _fp8_product(one, None)(one)
    except RuntimeError:
        return False
    return True


def check_fp8(device: torch.device) -> None:
    """Raises ConfigError if the device has no fp8 products."""
    if not multiplies_fp8(device):
        raise ConfigError(
            f"{Engine.FP8}: PyTorch {torch.__version__} has no fp8 matrix products on {device}: choose another "
            "--engine; signature and overlap take a CUDA --device of compute capability 8.9 or higher"
        )


@torch.no_grad()
def multiply_in_fp8(model: Any) -> None:
    """Makes every linear layer of a bfloat16 model, except the LM head, an fp8 product: each row of activations and
    each output channel has its own scale. Raises ConfigError if the device or a layer does not allow it."""
    check_fp8(model.device)
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module is not head:
            if module.in_features % FP8_MULTIPLE or module.out_features % FP8_MULTIPLE:
                raise ConfigError(
                    f"{Engine.FP8}: {name} has {module.in_features} inputs and {module.out_features} outputs, and an "
                    f"fp8 product needs multiples of {FP8_MULTIPLE}: choose another --engine for this model"
                )
            module.forward = _fp8_product(module.weight, module.bias)  # type: ignore[method-assign, assignment]


def _fp8_product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    columns, column_scale = _in_fp8(weight.float())

    def product(x: Tensor) -> Tensor:
        rows, row_scale = _in_fp8(x.flatten(0, -2).float())
        out: Tensor = torch._scaled_mm(
            rows, columns.t(), row_scale, column_scale.t(), bias=bias, out_dtype=torch.bfloat16
        )
        return out.view(*x.shape[:-1], -1)

    return product


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
