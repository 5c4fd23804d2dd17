"""Modules that compute in a different dtype from that of their parameters.

Parameters and floating-point inputs are cast at every call of the module that owns the parameters. Results therefore
equal those of a model loaded in that dtype, as an engine loads it. Autocast does not achieve this: it leaves
embeddings, norms and residuals in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


def compute_in(
    module: torch.nn.Module,
    dtype: torch.dtype,
    *,
    rounding: torch.dtype | None = None,
    but: torch.nn.Module | None = None,
) -> None:
    """Makes `module` and all its submodules, except `but`, compute in `dtype`; gradients keep the parameters' dtype.

    `rounding`: parameters are first rounded to the values of this lower dtype.
    """

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    def parameter(value: Any) -> Any:
        return cast(value if value is None or rounding is None else rounded(value, rounding))

    for part in module.modules():
        if part._parameters and part is not but:
            part.forward = _around(part, part.forward, cast, parameter)


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` rounded to those of the lower `dtype`, in their own dtype; the gradient passes unchanged."""
    return values + (values.detach().to(dtype).to(values.dtype) - values.detach())


def _around(
    part: torch.nn.Module, forward: Callable[..., Any], cast: Callable[[Any], Any], parameter: Callable[[Any], Any]
) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        kept = dict(part._parameters)
        part._parameters.update({name: parameter(value) for name, value in kept.items()})
        try:
            return forward(*tree_map(cast, args), **tree_map(cast, kwargs))
        finally:
            part._parameters.update(kept)

    return run
