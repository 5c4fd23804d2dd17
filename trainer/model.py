"""The policy that is trained: an ordinary Hugging Face causal LM, and its forward pass."""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from services.contract.errors import ConfigError
from services.dvp.policy import Constrained, constrained_logprobs
from services.engines.model_folder import has_linear_head

from .batch import MicroBatch
from .config import ModelSection
from .lm_head import head_logprobs
from .world import World

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


class Policy(torch.nn.Module):
    """pi_train_mp: from the token ids of a micro-batch to the constrained log-probs of its completions."""

    def __init__(self, model: PreTrainedModel, compute_dtype: str, *, log_min_p: float, temperature: float) -> None:
        super().__init__()
        self.model = model
        self._has_linear_head = has_linear_head(model)
        self._dtype: torch.dtype = getattr(torch, compute_dtype)
        self._log_min_p, self._temperature = log_min_p, temperature

    def forward(self, micro: MicroBatch) -> Constrained:
        """One entry per model token, in row-major order of `micro.mask`. Prompt positions never become logits."""
        inputs = {name: getattr(micro, name) for name in ("input_ids", "attention_mask", "position_ids")}
        token_ids, T = micro.token_ids[micro.mask], micro.mask.shape[1]
        with torch.autocast(micro.mask.device.type, dtype=self._dtype, enabled=self._dtype is not torch.float32):
            if not self._has_linear_head:
                logits = self.model(**inputs, use_cache=False, logits_to_keep=T + 1).logits[:, :-1][micro.mask]
            else:
                states = self.model.base_model(**inputs, use_cache=False).last_hidden_state[:, -T - 1 : -1][micro.mask]
        if not self._has_linear_head:
            return constrained_logprobs(logits, token_ids, log_min_p=self._log_min_p, temperature=self._temperature)
        head = self.model.get_output_embeddings()
        return head_logprobs(
            states, head.weight, head.bias, token_ids, log_min_p=self._log_min_p, temperature=self._temperature
        )


def shard(policy: Policy, world: World) -> None:
    """Each rank keeps a part of every parameter, of its gradient and of its optimizer state (FSDP2)."""
    device = next(policy.parameters()).device.type
    mesh = init_device_mesh(device, (world.size,))
    layers = set(policy.model._no_split_modules or ())
    for module in policy.model.modules():
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh)
    fully_shard(policy, mesh=mesh)


def full(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor: every rank has to ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
