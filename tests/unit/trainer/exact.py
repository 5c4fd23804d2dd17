"""The constrained policy by its formula: one sequence at a time, without padding or blocks, with full logits."""

from __future__ import annotations

import math

import torch
from transformers import PreTrainedModel

LOG_MIN_P, TEMPERATURE = -1.0, 0.8


def oracle_logprobs(
    model: PreTrainedModel,
    prompt: list[int],
    tokens: list[int],
    log_min_p: float = LOG_MIN_P,
    temperature: float = TEMPERATURE,
) -> torch.Tensor:
    """[T] log pi_mp of one unpadded sequence, with gradient; -inf outside the safe set."""
    logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    inside = logits - logits.amax(-1, keepdim=True) >= temperature * log_min_p
    kept = (logits / temperature).masked_fill(~inside, -math.inf)
    return torch.log_softmax(kept, -1)[torch.arange(len(tokens)), torch.tensor(tokens)]


def draw(model: PreTrainedModel, prompt: list[int], length: int, seed: int) -> list[int]:
    """Draws a sequence inside the model's safe sets."""
    generator, tokens = torch.Generator().manual_seed(seed), list[int]()
    for _ in range(length):
        logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, -1].detach()
        kept = (logits / TEMPERATURE).masked_fill(logits - logits.max() < TEMPERATURE * LOG_MIN_P, -math.inf)
        tokens.append(int(torch.multinomial(torch.softmax(kept, -1), 1, generator=generator)))
    return tokens
