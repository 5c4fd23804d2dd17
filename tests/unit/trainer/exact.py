"""The constrained policy and the estimator by their formulas: one sequence at a time, unpadded, with full logits."""

from __future__ import annotations

import math

import numpy as np
import torch
from transformers import PreTrainedModel

from dvp_rl.contract.group import Sample
from dvp_trainer.data.batch import Batch
from dvp_trainer.learn.step import Learner

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


def exact_logprobs(oracle: PreTrainedModel, prompt: np.ndarray, sample: Sample) -> torch.Tensor:
    """[M] of the drawn tokens, each given all that was read before it."""
    own = (prompt if sample.prompt_ids is None else sample.prompt_ids).tolist()
    drawn = [t for span in sample.versions for t in range(span.start, span.end)]
    return oracle_logprobs(oracle, own, sample.token_ids.tolist())[drawn]


def expected_gradient(
    oracle: PreTrainedModel, batch: Batch, *, cap: float = 2.0, denominator: int | None = None
) -> dict[str, torch.Tensor]:
    """-1/D sum_y w A grad log pi over episodes y: sums run over the drawn tokens of all samples of y, D counts all
    episodes unless it is given, w = exp(sum l) if <= cap else 0, A = R - mean of the others."""
    oracle.zero_grad()
    D = denominator or sum(len(scored.rewards) for scored in batch.groups)
    for group in batch.groups:
        rewards = np.array(group.rewards)
        for i, samples in enumerate(group.group.episodes):
            A = rewards[i] - np.delete(rewards, i).mean()
            own = torch.cat([exact_logprobs(oracle, group.group.prompt_ids, sample) for sample in samples])
            infer = torch.from_numpy(np.concatenate([sample.logprobs.astype(np.float64) for sample in samples]))
            w = float((own.detach() - infer).sum().exp())
            if bool(own.isfinite().all()) and w <= cap:
                (-w * A * own.sum() / D).backward()
    return {name: p.grad.clone() for name, p in oracle.named_parameters() if p.grad is not None}


def gradient_of(learner: Learner, batch: Batch) -> dict[str, torch.Tensor]:
    assert learner.step(batch)["optimizer/updates"] == 1
    return {name: p.grad for name, p in learner.model.named_parameters() if p.grad is not None}
