"""A weight folder that holds only a low-rank adapter, as PEFT writes it, for the model a replica was started with.

adapter_config.json, adapter_model.safetensors    r and lora_alpha; A and B of every adapted layer
dvp-base.json                                     {"digest": ...} of that model's folder
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from dvp_rl.contract.errors import WeightError

CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "dvp-base.json"
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def holds_adapter(folder: Path) -> bool:
    return (folder / WEIGHTS).is_file()


def check_base(folder: Path, digest: str) -> None:
    """Raises WeightError unless the adapter belongs to the model folder of this digest."""
    try:
        wanted = json.loads((folder / BASE).read_text())["digest"]
    except (OSError, ValueError, KeyError) as error:
        raise WeightError(f"weight folder {folder}: no digest in {BASE}: {error}") from None
    if digest != wanted:
        raise WeightError(
            f"weight folder {folder}: the adapter belongs to model {wanted}, but this replica was started with "
            f"{digest}; start it with the trainer's model.path, or set lora.publish = 'merged' in the trainer"
        )


def with_adapter(folder: Path, base: dict[str, Tensor], adapter: dict[str, Tensor]) -> dict[str, Tensor]:
    """The base weights, with W + lora_alpha / r B A in float32 for each adapted layer. Raises WeightError if the base
    lacks W."""
    config = json.loads((folder / CONFIG).read_text())
    scaling, weights = config["lora_alpha"] / config["r"], dict(base)
    for name in adapter:
        layer = name.removeprefix(PREFIX).removesuffix(A)
        if not name.endswith(A):
            continue
        if f"{layer}.weight" not in base:
            raise WeightError(f"weight folder {folder}: tensor {name} does not belong to this model")
        down, up = (adapter[f"{PREFIX}{layer}{part}"].to(torch.float32) for part in (A, B))
        weights[f"{layer}.weight"] = base[f"{layer}.weight"].to(torch.float32) + scaling * (up @ down)
    return weights
