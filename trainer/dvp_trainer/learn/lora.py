"""Low-rank adapters (LoRA, arXiv 2106.09685) by PEFT: W + alpha / rank B A, where only A and B are trained.

PEFT replaces linear layers inside the model, so that all other code sees the same model. The original layer becomes the
module's `base_layer`; the adapter is named `default`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dvp_rl.contract.errors import ConfigError
from dvp_rl.engines.adapter import PREFIX
from dvp_rl.extras import pip_install
from dvp_trainer.config import LoraSection

from .model import full

ADAPTER = "default"
BASE = ".base_layer."


def add_lora(model: PreTrainedModel, section: LoraSection, seed: int) -> None:
    """Freezes the model and adds adapters, with A drawn from `seed` and B zero. Raises ConfigError if PEFT is not
    installed, and as `linear_layers` does."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as error:
        raise ConfigError(f"lora.rank is {section.rank}: needs {error.name}: {pip_install('lora')}") from None
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        target_modules=linear_layers(model, section.targets),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    # The wrapper hides the model type: for types it knows, PEFT would adapt experts instead of these linear layers.
    unknown = torch.nn.ModuleDict({"model": model})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(config, unknown, adapter_name=ADAPTER)
    model.peft_config = unknown.peft_config


def linear_layers(model: PreTrainedModel, targets: Collection[str]) -> list[str]:
    """Names of the linear layers that end with one of `targets`; of all but the LM head if `targets` is empty. Raises
    ConfigError if a target is the LM head or the embedding, or if there is no such layer."""
    named = f"lora.targets {list(targets)}"
    ends = {id(model.get_output_embeddings()), id(model.get_input_embeddings())}
    found = []
    for name, module in model.named_modules():
        if not targets or any(f".{name}".endswith(f".{target}") for target in targets):
            if id(module) in ends and targets:
                raise ConfigError(
                    f"{named}: the LM head and the embedding cannot have an adapter; name linear layers in between, "
                    "such as q_proj or down_proj, or none to adapt all of them"
                )
            if type(module) is torch.nn.Linear and id(module) not in ends:  # a router may be a subclass
                found.append(name)
    if not found:
        raise ConfigError(f"{named}: model type {model.config.model_type} has no such linear layers; name others")
    return found


def lora_scaling(model: PreTrainedModel) -> float | None:
    """alpha / rank; None if there are no adapters."""
    factors = (module.scaling[ADAPTER] for module in model.modules() if hasattr(module, "lora_A"))
    return next(factors, None)


def merged(model: PreTrainedModel, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Names of the tensors that the model has without adapters, each with a function that returns the whole tensor,
    adapter merged. Every rank must call it."""
    for name, tensor in tensors:
        if ".lora_" not in name:
            yield name.replace(BASE, "."), partial(_merge, model, name, tensor)


@torch.no_grad()
def _merge(model: PreTrainedModel, name: str, tensor: Tensor) -> Tensor:
    layer, _, rest = name.partition(BASE)
    whole = full(tensor.detach())
    if rest != "weight":
        return whole
    module = model.get_submodule(layer)
    A, B = (full(part[ADAPTER].weight.detach()) for part in (module.lora_A, module.lora_B))
    merged: Tensor = whole + module.scaling[ADAPTER] * (B @ A)
    return merged


def adapters(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """A and B of every adapted layer, under the names that PEFT stores them by; sharded tensors stay sharded."""
    for name, tensor in model.named_parameters():
        if ".lora_" in name:
            yield PREFIX + name.replace(f".{ADAPTER}.", "."), tensor
