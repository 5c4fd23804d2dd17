"""Reference outputs of a model, for a single unpadded sequence, with Transformers' plain ("eager") attention. Engine
and trainer measure every faster way to run the model against them.

Shapes: one row of L tokens; H hidden units.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from dvp_rl.contract.errors import ConfigError

from .context import edges

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

EAGER = "eager"
TOLERANCE = {torch.bfloat16: 0.5}
EXACT_TOLERANCE = 1e-3
"""Largest accepted gap, in standard deviations of the states, for dtypes not in TOLERANCE: above rounding, below the
error of a layout or attention unfit for the model. Capped attention may show less: see context.caps_attention."""
LONGEST = 8192
"""Maximum length of a trial sequence, in tokens: eager attention stores a score for every pair of them."""
OPERATIONS = {"cpu": 2e12}
MANY_OPERATIONS = 1e15
"""Maximum number of floating-point operations per trial, on devices not in OPERATIONS."""


def states(model: Any, inputs: Mapping[str, Any]) -> Float[Tensor, "rows columns H"]:
    """The last hidden states, or the logits if the model does not expose its hidden states."""
    if model.base_model is model:
        logits: Tensor = model(**inputs, use_cache=False).logits
        return logits
    hidden: Tensor = model.base_model(**inputs, use_cache=False).last_hidden_state
    return hidden


@contextmanager
def attending(model: Any, attention: str) -> Iterator[None]:
    """Makes the model use the Transformers attention of that name within the block. Raises ConfigError if it cannot."""
    before = model.config._attn_implementation
    attend_by(model, attention)
    try:
        yield
    finally:
        attend_by(model, before)


def attend_by(model: Any, attention: str) -> None:
    """Switches the model to the attention of that name. Raises ConfigError if it cannot be switched."""
    if model.config._attn_implementation == attention:
        return
    if not takes_attention(model):
        raise ConfigError(f"model type {model.config.model_type} has its own attention, which cannot be replaced")
    model.set_attn_implementation(attention)


def takes_attention(model: Any) -> bool:
    """Whether attention can be switched. Older families hard-code theirs, and Transformers would only log a warning."""
    takes: bool = model._can_set_attn_implementation()
    return takes


@torch.no_grad()
def states_alone(model: Any, token_ids: Int[Tensor, " L"]) -> Float[Tensor, "L H"]:
    with attending(model, EAGER):
        return states(model, {"input_ids": token_ids[None]})[0]


def gap(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, in standard deviations of `theirs`; NaN if a value is not finite."""
    return float((ours - theirs).abs().max() / theirs.std())


def tolerance(dtype: torch.dtype) -> float:
    """Upper bound of the gap that rounding alone causes."""
    return TOLERANCE.get(dtype, EXACT_TOLERANCE)


def longest_edge(model: Any, *, below: int, num_sequences: int) -> tuple[int, int]:
    """The longest edge of `context.edges` that a trial of `num_sequences` sequences can cross on this device, and the
    longest edge under `below`; 0 for none."""
    found = [edge for edge in edges(model.config) if edge < below]
    operations = OPERATIONS.get(model.device.type, MANY_OPERATIONS)
    affordable = operations / (2 * model.num_parameters() * num_sequences)
    tried = [edge for edge in found if edge < min(affordable, LONGEST)]
    return max(tried, default=0), max(found, default=0)


def some_tokens(model: Any, length: int) -> Int[Tensor, " length"]:
    """Arbitrary but fixed token ids, low ones, because these stand for text even where others stand for images."""
    generator = torch.Generator().manual_seed(0)
    vocab = model.get_input_embeddings().weight.shape[0]
    return torch.randint(2, min(vocab, 1024), (length,), generator=generator).to(model.device)
