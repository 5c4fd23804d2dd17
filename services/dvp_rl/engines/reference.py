"""What a model says of a sequence that is alone, unpadded and attended to by the plain formula ("eager"): the measure
for every faster way to ask it, on both sides.

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
"""Standard deviations of the states, here of every other dtype: above what rounding moves them by, below what a layout
or an attention does to a model that does not bear it. Capped attention may show less: see context.caps_attention."""
LONGEST = 8192
"""Tokens of a sequence that is tried: the plain formula keeps a number for every pair of them."""
OPERATIONS = {"cpu": 2e12}
MANY_OPERATIONS = 1e15
"""Floating-point operations that a trial may cost, here on anything but a CPU."""


def states(model: Any, inputs: Mapping[str, Any]) -> Float[Tensor, "rows columns H"]:
    """The last hidden states; the logits of a model that keeps those to itself."""
    if model.base_model is model:
        logits: Tensor = model(**inputs, use_cache=False).logits
        return logits
    hidden: Tensor = model.base_model(**inputs, use_cache=False).last_hidden_state
    return hidden


@contextmanager
def attending(model: Any, attention: str) -> Iterator[None]:
    """Within it, the model attends by what has that name with Transformers. Raises ConfigError if it cannot."""
    before = model.config._attn_implementation
    attend_by(model, attention)
    try:
        yield
    finally:
        attend_by(model, before)


def attend_by(model: Any, attention: str) -> None:
    """The model attends so from now on. Raises ConfigError if it cannot."""
    if model.config._attn_implementation == attention:
        return
    if not takes_attention(model):
        raise ConfigError(f"model type {model.config.model_type} has attention of its own, it takes no other")
    model.set_attn_implementation(attention)


def takes_attention(model: Any) -> bool:
    """False for the families of old, whose attention is part of their code: Transformers would only log a warning."""
    takes: bool = model._can_set_attn_implementation()
    return takes


@torch.no_grad()
def states_alone(model: Any, token_ids: Int[Tensor, " L"]) -> Float[Tensor, "L H"]:
    with attending(model, EAGER):
        return states(model, {"input_ids": token_ids[None]})[0]


def gap(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, in standard deviations of `theirs`; NaN if something is not finite."""
    return float((ours - theirs).abs().max() / theirs.std())


def tolerance(dtype: torch.dtype) -> float:
    """The gap that rounding alone stays below."""
    return TOLERANCE.get(dtype, EXACT_TOLERANCE)


def longest_edge(model: Any, *, below: int, num_sequences: int) -> tuple[int, int]:
    """The longest edge of `context.edges` that so many sequences can be tried across here, and the longest that is
    `below`; 0 for none."""
    found = [edge for edge in edges(model.config) if edge < below]
    operations = OPERATIONS.get(model.device.type, MANY_OPERATIONS)
    affordable = operations / (2 * model.num_parameters() * num_sequences)
    tried = [edge for edge in found if edge < min(affordable, LONGEST)]
    return max(tried, default=0), max(found, default=0)


def some_tokens(model: Any, length: int) -> Int[Tensor, " length"]:
    """Any, always the same; low ones, which stand for text also where others stand for pictures."""
    generator = torch.Generator().manual_seed(0)
    vocab = model.get_input_embeddings().weight.shape[0]
    return torch.randint(2, min(vocab, 1024), (length,), generator=generator).to(model.device)
