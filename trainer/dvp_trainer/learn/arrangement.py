"""How the sequences of a micro-batch lie beside each other and how a model attends to them: the fastest way in which it
says of every sequence what it says of it alone.

That is tried at start, across the edges of the windows and chunks that the config names. What a family makes of padding
or of a fused attention is in no config: soft caps, biases, states that run on through padding.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from dvp_rl.contract.errors import ConfigError
from dvp_rl.engines.context import caps_attention, text_config
from dvp_rl.engines.reference import EAGER, attending, gap, longest_edge, some_tokens, states, states_alone, tolerance

from .attention import PACKED
from .layout import Layout, Tokens, packed, padded

logger = logging.getLogger(__name__)

NUM_TRIED = 12
"""Long sequences that all trials together read, at most."""


class Beside(StrEnum):
    """Where the sequences of a micro-batch lie."""

    PACKED = "packed"
    """In one row without padding, a prompt that several share once."""
    PADDED = "padded"
    """In rows as long as the longest."""
    ALONE = "alone"
    """There is one."""


class Arrangement(NamedTuple):
    beside: Beside
    attention: str
    """By the name that Transformers knows."""

    def __str__(self) -> str:
        return f"{self.beside}, {EAGER} attention" if self.attention == EAGER else str(self.beside)


class Trial(NamedTuple):
    arrangement: Arrangement
    gap: float
    """Standard deviations by which it moves hidden states; NaN if that is not known."""
    refusal: str
    """Why it is not used; empty if it may be."""


def arrange(model: PreTrainedModel, *, packable: bool) -> Arrangement:
    """The first of `trials` that may be used. Raises ConfigError with what was found if none may."""
    refused: list[str] = []
    for arrangement, _, refusal in trials(model, packable=packable):
        if not refusal:
            logger.info("%s: %s", model.config.model_type, "; ".join([f"sequences are {arrangement}", *refused]))
            return arrangement
        refused.append(f"not {arrangement}: {refusal}")
    raise ConfigError(f"model type {model.config.model_type} cannot be trained: {'; '.join(refused)}")


def trials(model: PreTrainedModel, *, packable: bool) -> Iterator[Trial]:
    """Fastest first. `packable`: logits are the product of LM head and hidden state alone, as `has_linear_head` finds
    out. Raises ConfigError if the model is none that a trainer and a sampler can agree on."""
    usual = model.config._attn_implementation
    context = getattr(text_config(model.config), "max_position_embeddings", sys.maxsize)
    tried_edge, edge = longest_edge(model, below=context, num_sequences=NUM_TRIED)
    sequences = _sequences(model, tried_edge)
    wanted = _reference_states(model, sequences)
    arrangements = [
        Arrangement(Beside.PACKED, PACKED),
        Arrangement(Beside.PADDED, usual),
        Arrangement(Beside.ALONE, usual),
        Arrangement(Beside.PADDED, EAGER),
        Arrangement(Beside.ALONE, EAGER),
    ]
    for arrangement in dict.fromkeys(arrangements):
        found, refusal = float("nan"), ""
        if arrangement.beside is not Beside.ALONE and tried_edge < edge:
            refusal = f"its layers change at {edge} tokens, and to read as many would take too long here"
        elif arrangement.attention != EAGER and caps_attention(model.config):
            refusal = "attention scores are capped"
        elif arrangement.beside is Beside.PACKED and not packable:
            refusal = "logits are not the product of LM head and hidden state alone"
        else:
            try:
                found = gap(_arranged_states(model, arrangement, sequences), wanted)
                if not found <= tolerance(model.dtype):
                    refusal = f"hidden states would differ by {found:.2g} standard deviations"
            except Exception as error:  # noqa: BLE001 - whatever a foreign architecture stumbles over
                refusal = _first_line(error)
        yield Trial(arrangement, found, refusal)


def lay_out(beside: Beside, sequences: list[Tokens], pad_id: int, device: torch.device) -> Layout:
    return packed(sequences, device) if beside is Beside.PACKED else padded(sequences, pad_id, device)


def _sequences(model: PreTrainedModel, edge: int) -> list[Tokens]:
    """The first two share a prompt, and cross the edge in their completions; two short ones."""
    ids = some_tokens(model, edge + 64).cpu().numpy()
    P = max(4, edge - 3)
    prompt, rest = ids[:P], ids[P:]
    return [
        Tokens(prompt, rest[:9]),
        Tokens(prompt, rest[9:15]),
        Tokens(rest[15:18], rest[18:19]),
        Tokens(rest[20:21], rest[21:28]),
    ]


@torch.no_grad()
def _reference_states(model: PreTrainedModel, sequences: list[Tokens]) -> Tensor:
    """Those that predict the completions, of each sequence alone."""
    kind = model.config.model_type
    try:
        alone = [states_alone(model, torch.from_numpy(_read(tokens)).to(model.device)) for tokens in sequences]
    except Exception as error:
        raise ConfigError(
            f"model type {kind} cannot be trained: it cannot read a sequence: {_first_line(error)}"
        ) from error
    P = len(sequences[0].prompt)
    if not (found := gap(alone[0][:P], alone[1][:P])) <= tolerance(model.dtype):
        raise ConfigError(
            f"model type {kind} cannot be trained: what follows a token moves its hidden state, by {found:.2g} "
            "standard deviations, as in an encoder; name a causal LM"
        )
    return torch.cat([part[len(tokens.prompt) - 1 :] for part, tokens in zip(alone, sequences, strict=True)])


@torch.no_grad()
def _arranged_states(model: PreTrainedModel, arrangement: Arrangement, sequences: list[Tokens]) -> Tensor:
    """The same of sequences that lie so."""
    parts = [[tokens] for tokens in sequences] if arrangement.beside is Beside.ALONE else [sequences]
    found = []
    with attending(model, arrangement.attention):
        for part in parts:
            layout = lay_out(arrangement.beside, part, 0, model.device)
            found.append(states(model, layout.model_inputs()).flatten(0, 1)[layout.before])
    return torch.cat(found)


def _read(tokens: Tokens) -> NDArray[np.integer[Any]]:
    """The last token is predicted and never read."""
    return np.concatenate(tokens)[:-1]


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
