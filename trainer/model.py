"""The policy that is trained: an ordinary Hugging Face causal LM, and its forward pass."""

from __future__ import annotations

import logging
import sys
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from services.contract.errors import ConfigError
from services.contract.shape import Shape
from services.dvp.policy import Constrained, constrained_logprobs, split_rows
from services.engines.compute_dtype import compute_in, rounded
from services.engines.fixed_shape import check_fixed_shape, whole_blocks
from services.engines.kv_cache import ATTENTION
from services.engines.model_folder import complete_model, has_linear_head, narrow_layers

from .attention import PACKED
from .config import ModelSection
from .layout import Tokens, packed
from .lm_head import head_logprobs
from .micro_batch import MicroBatch
from .world import World

logger = logging.getLogger(__name__)

PACKING_TOLERANCE = 1e-2
"""Standard deviations of the hidden states: far above rounding, far below another attention."""
NOISE_TOLERANCE = 1e-3
"""Standard deviations of the logits: above what atomic additions on a GPU move, far below dropout and noise."""


def load_model(section: ModelSection, *, sharded: bool = False) -> PreTrainedModel:
    """fp32 master weights from a local folder, in evaluation mode. It is trained in this mode, too: dropout and router
    noise would give the sampler and the trainer different policies.

    One that is to be sharded stays in the host's memory: it moves to its device layer by layer, as each is cut.

    Raises ConfigError if the folder holds no causal LM in safetensors, one that lacks weights, or one that is random
    nonetheless.
    """
    folder = section.path
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path = {str(folder)!r}: no config.json there; give a Hugging Face folder")
    model: PreTrainedModel = complete_model(f"model.path = {str(folder)!r}", folder, dtype=torch.float32)
    if section.gradient_checkpointing:
        recompute_layers(model)
    logger.info("%s with %.1f M parameters", type(model).__name__, model.num_parameters() / 1e6)
    model = model if sharded else model.to(section.device)
    check_repeatable(model)
    return model


def recompute_layers(model: PreTrainedModel) -> None:
    """Layers keep nothing of a forward but their inputs: the backward computes the rest again. Transformers would do so
    in training mode only. Raises ConfigError if the model does not say what its layers are."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"model.gradient_checkpointing: not for model type {model.config.model_type}, whose layers are not known; "
            "set it to false"
        )
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def check_repeatable(model: PreTrainedModel) -> None:
    """Raises ConfigError unless a few tokens have the same logits in each of two forwards as they are trained, and in
    one without gradients."""
    ids = torch.arange(2, 10, device=model.device)[None] % model.get_input_embeddings().weight.shape[0]
    first, second = (model(input_ids=ids, use_cache=False).logits.detach() for _ in range(2))
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits
    gap = max((other - first).abs().max() for other in (second, plain))
    if not gap <= NOISE_TOLERANCE * first.std():
        raise ConfigError(
            f"model type {model.config.model_type}: the same tokens have other logits in the next forward, by up to "
            f"{gap:.3g}: it draws random numbers, which no inference engine does; turn its dropout or noise off in "
            "config.json, or train another model"
        )


class Policy(torch.nn.Module):
    """pi_train_mp: from the token ids of a micro-batch to the constrained log-probs of its completions."""

    def __init__(
        self,
        model: PreTrainedModel,
        compute_dtype: str,
        *,
        log_min_p: float,
        temperature: float,
        shape: Shape | None = None,
        fp32_head: bool = False,
    ) -> None:
        super().__init__()
        self.model = model.eval()
        self._has_linear_head = has_linear_head(model)
        self.shape = shape
        """Of every forward, if it is fixed."""
        self.packs = shape is None and self._has_linear_head and use_packed_attention(model)
        """Sequences may come packed."""
        self.low_dtype: torch.dtype | None = None if compute_dtype == "float32" else getattr(torch, compute_dtype)
        """What forward and backward compute in, if it is not the dtype of the weights."""
        self._fp32_head = fp32_head
        self._log_min_p, self._temperature = log_min_p, temperature
        if self.low_dtype is not None:
            head = model.get_output_embeddings()
            compute_in(model, self.low_dtype, but=head)
            compute_in(head, torch.float32 if fp32_head else self.low_dtype, rounding=self.low_dtype)
        if shape is not None:
            model.set_attn_implementation(ATTENTION)
            check_fixed_shape(model, shape)

    def forward(self, micro: MicroBatch) -> Constrained:
        """One entry per model token, in row-major order of `micro.mask`. Prompt positions never become logits."""
        inputs, token_ids = micro.layout.model_inputs(), micro.token_ids[micro.mask]
        if not self._has_linear_head:
            T = micro.mask.shape[1]
            logits = self.model(**inputs, use_cache=False, logits_to_keep=T + 1).logits[:, :-1][micro.mask]
            return constrained_logprobs(logits, token_ids, log_min_p=self._log_min_p, temperature=self._temperature)
        head = self.model.get_output_embeddings()
        states = self.model.base_model(**inputs, use_cache=False).last_hidden_state
        states = states.flatten(0, 1).index_select(0, micro.layout.before)
        if self.shape is not None:
            return self._by_blocks(states, token_ids, self.shape.rows)
        weight, bias = head.weight, head.bias
        if self._fp32_head and self.low_dtype is not None:
            states, weight = states.float(), rounded(weight, self.low_dtype)
            bias = None if bias is None else rounded(bias, self.low_dtype)
        return head_logprobs(states, weight, bias, token_ids, log_min_p=self._log_min_p, temperature=self._temperature)

    def _by_blocks(self, states: Tensor, token_ids: Tensor, rows: int) -> Constrained:
        """As an engine of that shape computes it, bit for bit. The backward computes the logits again."""
        head = self.model.get_output_embeddings()

        def block(states: Tensor, token_ids: Tensor) -> Constrained:
            return constrained_logprobs(
                head(states), token_ids, log_min_p=self._log_min_p, temperature=self._temperature
            )

        whole = (whole_blocks(values, rows) for values in (states, token_ids))
        parts = [checkpoint(block, *part, use_reentrant=False) for part in split_rows(*whole, size=rows)]
        return Constrained(*(torch.cat(part)[: len(states)] for part in zip(*parts, strict=True)))


def shard(policy: Policy, device: torch.device, world: World) -> None:
    """Each rank keeps a part of every parameter, of its gradient and of its optimizer state (FSDP2)."""
    mesh = init_device_mesh(device.type, (world.size,))
    layers = set(policy.model._no_split_modules or ())
    # Layers are gathered in the dtype that they compute in; the LM head wants its weight whole and as it is.
    low = MixedPrecisionPolicy(param_dtype=policy.low_dtype, reduce_dtype=torch.float32)
    for module in policy.model.modules():
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh, mp_policy=low)
    fully_shard(policy, mesh=mesh)


def full(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor: every rank has to ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def use_packed_attention(model: PreTrainedModel) -> bool:
    """Makes the model attend within packed rows, if that leaves its answers as they are; else leaves it alone."""
    before = model.config._attn_implementation
    if narrow := narrow_layers(model.config, getattr(model.config, "max_position_embeddings", sys.maxsize)):
        reason = f"it has layers of {narrow[0]}"
    else:
        try:
            gap = packing_gap(model)
        except Exception as error:  # noqa: BLE001 - whatever a foreign architecture stumbles over
            reason = str(error)
        else:
            if gap <= PACKING_TOLERANCE:
                return True
            reason = f"hidden states would differ by {gap:.2g} standard deviations"
    model.set_attn_implementation(before)
    logger.info("sequences are padded, not packed, for %s: %s", model.config.model_type, reason)
    return False


@torch.no_grad()
def packing_gap(model: PreTrainedModel) -> float:
    """How far packing moves the hidden states of a few tokens, in standard deviations; the model attends packed then.

    Rounding, for full attention as Llama has it; far more where a layer keeps a state, or biases or caps attention in
    its own way.
    """
    device, vocab = model.device, model.get_input_embeddings().weight.shape[0]
    ids = np.arange(2, 14) % vocab
    pack = [Tokens(ids[:4], ids[4:9]), Tokens(ids[6:9], ids[9:10]), Tokens(ids[:4], ids[9:12])]
    alone = [torch.tensor(np.concatenate(tokens))[None, :-1].to(device) for tokens in pack]
    theirs = [model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0] for ids in alone]
    wanted = torch.cat([states[len(prompt) - 1 :] for states, (prompt, _) in zip(theirs, pack, strict=True)])
    layout = packed(pack, device)
    model.set_attn_implementation(PACKED)
    ours = model.base_model(**layout.model_inputs(), use_cache=False).last_hidden_state[0][layout.before]
    return float((ours - wanted).abs().max() / wanted.std())
