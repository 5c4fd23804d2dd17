"""The policy that is trained: an ordinary Hugging Face causal LM, and its forward pass."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from services.contract.errors import ConfigError

from .batch import MicroBatch
from .config import ModelSection

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

logger = logging.getLogger(__name__)


def load_model(section: ModelSection) -> PreTrainedModel:
    """fp32 master weights from a local folder. Raises ConfigError if it holds no causal LM in safetensors."""
    folder = section.path
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path = {str(folder)!r}: no config.json there; give a Hugging Face folder")
    transformers_logging.disable_progress_bar()
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"model.path = {str(folder)!r}: not a causal LM for transformers: {error}") from error
    if section.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    # Dropout would give the sampler and the trainer different policies.
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    logger.info("%s with %.1f M parameters", type(model).__name__, model.num_parameters() / 1e6)
    return model.to(section.device)


def linear_head(model: PreTrainedModel) -> torch.nn.Linear | None:
    """The LM head, if the logits are nothing but its product with the last hidden state; None if a soft cap or a scale
    follows. Found out by comparing both on a few tokens, bit for bit."""
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        return None
    ids = torch.arange(8, device=head.weight.device).remainder(head.out_features).unsqueeze(0)
    with torch.no_grad():
        states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return head if torch.equal(head(states), model(input_ids=ids, use_cache=False).logits) else None


def completion_states(model: PreTrainedModel, micro: MicroBatch) -> Float[Tensor, "tokens hidden"]:
    """Last hidden states that predict each model token of the micro-batch, in row-major order of `micro.mask`."""
    output = model.base_model(**_inputs(micro))
    states: Tensor = output.last_hidden_state[:, -micro.mask.shape[1] - 1 : -1]
    return states[micro.mask]


def completion_logits(model: PreTrainedModel, micro: MicroBatch) -> Float[Tensor, "tokens V"]:
    """The same for logits. Those of prompt positions are never computed."""
    output = model(**_inputs(micro), logits_to_keep=micro.mask.shape[1] + 1)
    logits: Tensor = output.logits[:, :-1]
    return logits[micro.mask]


def _inputs(micro: MicroBatch) -> dict[str, Any]:
    return {
        "input_ids": micro.input_ids,
        "attention_mask": micro.attention_mask,
        "position_ids": micro.position_ids,
        "use_cache": False,
    }
