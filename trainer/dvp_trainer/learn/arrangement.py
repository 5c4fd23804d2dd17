"""Chooses the layout of the sequences of a micro-batch and the attention of the model: the fastest arrangement in which
the model computes the same for every sequence as for that sequence alone.

Arrangements are tried at start, with sequences that cross the edges of the windows and chunks named in the config. The
config does not tell how a family treats padding or fused attention: soft caps, biases, states that run through padding.
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
"""Maximum number of long sequences read in all trials together."""


class Beside(StrEnum):
    """Layout of the sequences of a micro-batch."""

    PACKED = "packed"
    """One row without padding, with every shared prompt once."""
    PADDED = "padded"
    """One row per sequence, padded to the longest."""
    ALONE = "alone"
    """One sequence per micro-batch."""


class Arrangement(NamedTuple):
    beside: Beside
    attention: str
    """Name of the attention in Transformers."""

    def __str__(self) -> str:
        return f"{self.beside}, {EAGER} attention" if self.attention == EAGER else str(self.beside)


class Trial(NamedTuple):
    arrangement: Arrangement
    gap: float
    """Largest difference of hidden states from the reference, in standard deviations; NaN if unknown."""
    refusal: str
    """Why the arrangement cannot be used; empty if it can."""


def arrange(model: PreTrainedModel, *, packable: bool) -> Arrangement:
    """The first usable arrangement of `trials`. Raises ConfigError with all refusals if there is none."""
    refused: list[str] = []
    for arrangement, _, refusal in trials(model, packable=packable):
        if not refusal:
            logger.info("%s: %s", model.config.model_type, "; ".join([f"sequences are {arrangement}", *refused]))
            return arrangement
        refused.append(f"not {arrangement}: {refusal}")
    raise ConfigError(f"model type {model.config.model_type} cannot be trained: {'; '.join(refused)}")


def trials(model: PreTrainedModel, *, packable: bool) -> Iterator[Trial]:
    """Tries all arrangements, fastest first. `packable`: logits are only the product of LM head and hidden state, as
    `has_linear_head` tests. Raises ConfigError if the model cannot read a sequence or is not causal."""
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
            refusal = f"its layers change at {edge} tokens, and a trial of that length would take too long here"
        elif arrangement.attention != EAGER and caps_attention(model.config):
            refusal = "attention scores are capped"
        elif arrangement.beside is Beside.PACKED and not packable:
            refusal = "logits are not just the product of LM head and hidden state"
        else:
            try:
                found = gap(_arranged_states(model, arrangement, sequences), wanted)
                if not found <= tolerance(model.dtype):
                    refusal = f"hidden states would differ by {found:.2g} standard deviations"
            except Exception as error:  # noqa: BLE001 - an architecture can raise anything here
                refusal = _first_line(error)
        yield Trial(arrangement, found, refusal)


def lay_out(beside: Beside, sequences: list[Tokens], pad_id: int, device: torch.device) -> Layout:
    return packed(sequences, device) if beside is Beside.PACKED else padded(sequences, pad_id, device)


def _sequences(model: PreTrainedModel, edge: int) -> list[Tokens]:
    """Two sequences that share a prompt and cross the edge in their completions, and two short ones."""
    ids = some_tokens(model, edge + 64).cpu().numpy()
    P = max(4, edge - 3)
    prompt, rest = ids[:P], ids[P:]
    parts = [(prompt, rest[:9]), (prompt, rest[9:15]), (rest[15:18], rest[18:19]), (rest[20:21], rest[21:28])]
    return [Tokens(*part, np.ones(len(part[1]), bool)) for part in parts]


@torch.no_grad()
def _reference_states(model: PreTrainedModel, sequences: list[Tokens]) -> Tensor:
    """Hidden states that predict the completions, each sequence read alone. Raises ConfigError as `trials` does."""
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
            f"model type {kind} cannot be trained: later tokens change a token's hidden state, by {found:.2g} "
            "standard deviations, as in an encoder; use a causal LM"
        )
    return torch.cat([part[len(tokens.prompt) - 1 :] for part, tokens in zip(alone, sequences, strict=True)])


@torch.no_grad()
def _arranged_states(model: PreTrainedModel, arrangement: Arrangement, sequences: list[Tokens]) -> Tensor:
    """The same states with the sequences in this arrangement."""
    parts = [[tokens] for tokens in sequences] if arrangement.beside is Beside.ALONE else [sequences]
    found = []
    with attending(model, arrangement.attention):
        for part in parts:
            layout = lay_out(arrangement.beside, part, 0, model.device)
            found.append(states(model, layout.model_inputs()).flatten(0, 1)[layout.before])
    return torch.cat(found)


def _read(tokens: Tokens) -> NDArray[np.integer[Any]]:
    """The tokens that the model reads: all but the last, which is only predicted."""
    return np.concatenate([tokens.prompt, tokens.completion])[:-1]


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
