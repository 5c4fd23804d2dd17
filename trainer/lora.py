"""Low-rank adapters (LoRA, arXiv 2106.09685) by PEFT: W + alpha / rank B A, of which only A and B are trained.

They are injected into the model's own linear layers, so that everything else sees the same model: its own weight is a
module's `base_layer`, and the adapter has the name `default`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from services.contract.errors import ConfigError
from services.engines.adapter import PREFIX

from .config import LoraSection
from .model import full

ADAPTER = "default"
BASE = ".base_layer."


def add_lora(model: PreTrainedModel, section: LoraSection, seed: int) -> None:
    """Freezes the model and gives it adapters, A drawn by `seed` and B zero. Raises ConfigError naming what cannot have
    one."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as error:
        raise ConfigError(f"lora.rank is {section.rank}: needs {error.name}: pip install 'dvp-rl[lora]'") from None
    named = f"lora.targets {list(section.targets)}"
    ends = {id(model.get_output_embeddings()), id(model.get_input_embeddings())}
    names = [f".{name}" for name, module in model.named_modules() if id(module) in ends]
    if any(name.endswith(f".{target}") for name in names for target in section.targets):
        raise ConfigError(
            f"{named}: the LM head and the embedding cannot have an adapter; name linear layers in between, as q_proj "
            "or down_proj, or none for all of them"
        )
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        target_modules=list(section.targets) or "all-linear",
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    except ValueError as error:
        raise ConfigError(f"{named}: {error}") from None


def lora_scaling(model: PreTrainedModel) -> float | None:
    """alpha / rank; None without adapters."""
    factors = (module.scaling[ADAPTER] for module in model.modules() if hasattr(module, "lora_A"))
    return next(factors, None)


@torch.no_grad()
def merged(model: PreTrainedModel, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Of the model's named tensors those that it would have without adapters, whole: every rank has to ask."""
    for name, tensor in tensors:
        layer, _, rest = name.partition(BASE)
        if ".lora_" in name:
            continue
        whole = full(tensor.detach())
        if rest == "weight":
            module = model.get_submodule(layer)
            A, B = (full(part[ADAPTER].weight.detach()) for part in (module.lora_A, module.lora_B))
            whole = whole + module.scaling[ADAPTER] * (B @ A)
        yield name.replace(BASE, "."), whole


def adapters(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """A and B of every layer that has them, by the names that PEFT stores them under; as they are held."""
    for name, tensor in model.named_parameters():
        if ".lora_" in name:
            yield PREFIX + name.replace(f".{ADAPTER}.", "."), tensor
