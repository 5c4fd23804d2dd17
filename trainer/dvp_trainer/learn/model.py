"""The policy in training: an ordinary Hugging Face causal LM and its forward pass."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from dvp_rl.contract.errors import ConfigError
from dvp_rl.contract.shape import Shape
from dvp_rl.dvp.lm_head import head_logprobs
from dvp_rl.dvp.policy import Constrained, constrained_logprobs, split_rows
from dvp_rl.engines.compute_dtype import compute_in, rounded
from dvp_rl.engines.context import rope_limit
from dvp_rl.engines.fixed_shape import check_fixed_shape, summable, whole_blocks
from dvp_rl.engines.kv_cache import ATTENTION
from dvp_rl.engines.model_folder import complete_model, has_linear_head
from dvp_rl.engines.reference import EAGER, attend_by, attending, gap, some_tokens, takes_attention, tolerance
from dvp_trainer.config import ModelSection, TrainSettings

from .arrangement import Arrangement, Beside, arrange
from .layout import Layout
from .micro_batch import Limit, MicroBatch
from .world import World

if TYPE_CHECKING:
    from jaxtyping import Float, Int

logger = logging.getLogger(__name__)


def load_model(section: ModelSection, *, sharded: bool = False) -> PreTrainedModel:
    """Loads fp32 master weights from a local folder, in evaluation mode. The model is also trained in this mode:
    dropout and router noise would give sampler and trainer different policies.

    A model to be sharded stays in host memory and moves to its device layer by layer, as each layer is sharded.

    Raises ConfigError if the folder holds no causal LM in safetensors, if weights are missing, or if the model is
    random even in evaluation mode.
    """
    folder = section.path
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path = {str(folder)!r}: no config.json there; give a Hugging Face folder")
    load = partial(complete_model, f"model.path = {str(folder)!r}", folder, dtype=torch.float32)
    model: PreTrainedModel = load()
    if not takes_attention(model) and model.config._attn_implementation != EAGER:
        model = load(attn_implementation=EAGER)  # its attention cannot be switched for the reference
    if section.gradient_checkpointing:
        recompute_layers(model)
    logger.info("%s with %.1f M parameters", type(model).__name__, model.num_parameters() / 1e6)
    model = model if sharded else model.to(section.device)
    check_repeatable(model)
    return model


def recompute_layers(model: PreTrainedModel) -> None:
    """Makes layers keep only their inputs of a forward; the backward recomputes the rest. Transformers does so in
    training mode only. Raises ConfigError if the model does not mark its layers."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"model.gradient_checkpointing: not supported for model type {model.config.model_type}, which does not "
            "mark its layers; set it to false"
        )
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def check_repeatable(model: PreTrainedModel) -> None:
    """Raises ConfigError unless a few tokens get the same logits in two forwards with gradients and in one without."""
    ids = some_tokens(model, 8)[None]
    first, second = (model(input_ids=ids, use_cache=False).logits.detach() for _ in range(2))
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits
    if not (found := gap(torch.stack([second, plain]), first)) <= tolerance(model.dtype):
        raise ConfigError(
            f"model type {model.config.model_type}: the logits of the same tokens differ between forwards, by up to "
            f"{found:.2g} standard deviations: the model draws random numbers, which no inference engine does; disable "
            "its dropout or noise in config.json, or train another model"
        )


@torch.no_grad()
def check_low_dtype(model: PreTrainedModel, name: str) -> None:
    """Raises ConfigError if the model's code mixes dtypes."""
    try:
        with attending(model, EAGER):
            model(input_ids=some_tokens(model, 8)[None], use_cache=False)
    except RuntimeError as error:
        raise ConfigError(
            f"model.compute_dtype = {name!r}: model type {model.config.model_type} cannot compute in it ({error}); use "
            "'float32'"
        ) from error


def check_rope(model: PreTrainedModel, settings: TrainSettings) -> None:
    """Raises ConfigError if a sequence could be long enough to change the model's RoPE."""
    limit = rope_limit(model.config)
    if limit is None:
        return
    P, T = settings.data.max_prompt_tokens, settings.sampling.max_tokens
    if P is None or limit < P + T:
        now = "data.max_prompt_tokens is not set" if P is None else f"sequences may have {P} + {T}"
        raise ConfigError(
            f"model type {model.config.model_type}: its RoPE changes in sequences of more than {limit} tokens, and "
            f"engine and trainer would not agree; {now}: set data.max_prompt_tokens and sampling.max_tokens so that "
            "no sequence is longer"
        )


class Policy(torch.nn.Module):
    """pi_train_mp: gives the model tokens of a micro-batch constrained log-probs."""

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
        """Shape of every forward if fixed, otherwise None."""
        if shape is None:
            self.attend(arrange(model, packable=self._has_linear_head))
        else:
            self.attend(Arrangement(Beside.PADDED, ATTENTION))
        self.low_dtype: torch.dtype | None = None if compute_dtype == "float32" else getattr(torch, compute_dtype)
        """Dtype of forward and backward; None: that of the weights."""
        self._fp32_head = fp32_head
        self._log_min_p, self._temperature = log_min_p, temperature
        if self.low_dtype is not None:
            head = model.get_output_embeddings()
            compute_in(model, self.low_dtype, but=head)
            compute_in(head, torch.float32 if fp32_head else self.low_dtype, rounding=self.low_dtype)
            check_low_dtype(model, compute_dtype)
        if shape is not None:
            check_fixed_shape(model, shape, self.low_dtype or model.dtype)

    def attend(self, arrangement: Arrangement) -> None:
        """Sets the arrangement of further micro-batches, and the model's attention with it."""
        self.arrangement = arrangement
        attend_by(self.model, arrangement.attention)

    def limit(self, max_tokens: int) -> Limit:
        """What its micro-batches may hold."""
        return Limit(self.arrangement.beside, max_tokens, self.shape, rope_limit(self.model.config))

    def read(self, micro: MicroBatch) -> Constrained:
        """One entry per model token, in row-major order of `micro.mask`."""
        return Constrained(*map(torch.cat, zip(*(self(*each) for each in micro.forwards()), strict=True)))

    def logits(self, layout: Layout) -> Float[Tensor, "tokens vocab"]:
        """The logits at each position in `layout.before`, all of them: for few positions."""
        logits: Tensor = self(layout, None)
        return logits

    def forward(self, layout: Layout, token_ids: Int[Tensor, " tokens"] | None) -> Constrained | Tensor:
        """One entry per position in `layout.before`, for the token that follows it; without `token_ids` its logits.
        Logits that predict other tokens are never computed, or not kept."""
        if not self._has_linear_head:
            logits = self._logits(layout)
            if token_ids is None:
                return logits
            return constrained_logprobs(logits, token_ids, log_min_p=self._log_min_p, temperature=self._temperature)
        head = self.model.get_output_embeddings()
        states = self.model.base_model(**layout.model_inputs(), use_cache=False).last_hidden_state
        states = states.flatten(0, 1).index_select(0, layout.before)
        if token_ids is None:
            whole: Tensor = head(states)
            return whole
        if self.shape is not None:
            return self._by_blocks(states, token_ids, self.shape.rows)
        weight, bias = head.weight, head.bias
        if self._fp32_head and self.low_dtype is not None:
            states, weight = states.float(), rounded(weight, self.low_dtype)
            bias = None if bias is None else rounded(bias, self.low_dtype)
        return head_logprobs(states, weight, bias, token_ids, log_min_p=self._log_min_p, temperature=self._temperature)

    def _logits(self, layout: Layout) -> Tensor:
        """Logits at the positions in `layout.before`. None are computed for the columns before the first of them."""
        width = layout.input_ids.shape[1]
        row, column = layout.before // width, layout.before % width
        first = int(column.amin()) if len(column) else width - 1
        kept: Tensor = self.model(**layout.model_inputs(), use_cache=False, logits_to_keep=width - first).logits
        return kept[row, column - first]

    def _by_blocks(self, states: Tensor, token_ids: Tensor, rows: int) -> Constrained:
        """Log-probs bit for bit as an engine of this shape computes them. The backward recomputes the logits."""
        head = self.model.get_output_embeddings()

        def block(states: Tensor, token_ids: Tensor) -> Constrained:
            own = constrained_logprobs(
                summable(head(states)), token_ids, log_min_p=self._log_min_p, temperature=self._temperature
            )
            return own._replace(logprobs=own.logprobs.float(), kept_mass=own.kept_mass.float())

        whole = (whole_blocks(values, rows) for values in (states, token_ids))
        parts = [checkpoint(block, *part, use_reentrant=False) for part in split_rows(*whole, size=rows)]
        return Constrained(*(torch.cat(part)[: len(states)] for part in zip(*parts, strict=True)))


def shard(policy: Policy, device: torch.device, world: World) -> None:
    """Shards every parameter, its gradient and its optimizer state across the ranks (FSDP2)."""
    mesh = init_device_mesh(device.type, (world.size,))
    layers = set(policy.model._no_split_modules or ())
    # Layers are gathered in the dtype they compute in; the LM head needs its weight whole, in its own dtype.
    low = MixedPrecisionPolicy(param_dtype=policy.low_dtype, reduce_dtype=torch.float32)
    for module in policy.model.modules():
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh, mp_policy=low)
    fully_shard(policy, mesh=mesh)


def full(tensor: Tensor) -> Tensor:
    """The whole tensor if it is sharded, otherwise the tensor itself. Every rank must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
