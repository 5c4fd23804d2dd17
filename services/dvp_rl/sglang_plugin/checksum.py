"""Weights that arrive over a process group are loaded only if they are what was announced."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

Weights: TypeAlias = list[tuple[str, Tensor]]

FORMAT = "sha256="
"""With the digest behind it the `load_format` of /update_weights_from_distributed: one buffer of that checksum."""
SGLANG_FORMAT = "flattened_bucket"
"""SGLang's name for one buffer without."""


def receive_checked(
    receive: Callable[..., Weights], updater: Any, *args: Any, load_format: str | None = None, **kwargs: Any
) -> Weights:
    """Raises ValueError, before any of them is loaded, if the bytes are others. Other formats go through."""
    if load_format is None or not load_format.startswith(FORMAT):
        return receive(updater, *args, load_format=load_format, **kwargs)
    weights = receive(updater, *args, load_format=SGLANG_FORMAT, **kwargs)
    expected, found = load_format.removeprefix(FORMAT), sha256(weights)
    if found != expected:
        raise ValueError(f"the bytes received have SHA-256 {found}, announced was {expected}")
    return weights


def sha256(weights: Weights) -> str:
    """Over the bytes of all tensors, one after the other."""
    digest = hashlib.sha256()
    for _, tensor in weights:
        digest.update(tensor.reshape(-1).view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()
