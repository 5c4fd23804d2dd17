"""Verification of weights that arrive over a process group: only bytes with the announced digest are loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

Weights: TypeAlias = list[tuple[str, Tensor]]

FORMAT = "sha256="
"""Prefix of the `load_format` in /update_weights_from_distributed for one buffer; the digest of its bytes follows."""
SGLANG_FORMAT = "flattened_bucket"
"""SGLang's name for one buffer without a digest."""


def receive_checked(
    receive: Callable[..., Weights], updater: Any, *args: Any, load_format: str | None = None, **kwargs: Any
) -> Weights:
    """Receives weights. Raises ValueError before any is loaded if the digest differs. Other formats pass unchecked."""
    if load_format is None or not load_format.startswith(FORMAT):
        return receive(updater, *args, load_format=load_format, **kwargs)
    weights = receive(updater, *args, load_format=SGLANG_FORMAT, **kwargs)
    expected, found = load_format.removeprefix(FORMAT), sha256(weights)
    if found != expected:
        raise ValueError(f"expected bytes with SHA-256 {expected}, received {found}")
    return weights


def sha256(weights: Weights) -> str:
    """SHA-256 of the bytes of all tensors, one after the other."""
    digest = hashlib.sha256()
    for _, tensor in weights:
        digest.update(tensor.reshape(-1).view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()
