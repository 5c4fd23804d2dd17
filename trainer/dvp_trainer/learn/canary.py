"""The canary of the weights in training: see dvp_rl.contract.canary.

Greedy continuations without a key-value cache: all tokens are guessed, one forward tells the best token at each
position, and these are the next guess. After k forwards the first k tokens are right. From one version to the next,
most guesses are.

Shapes: W walks of T tokens each, V tokens in the vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from dvp_rl.contract.canary import CANARY_NAME, Canary, Walk, coarser, margin
from dvp_rl.contract.errors import ConfigError
from dvp_rl.engines.context import model_context

from .layout import Tokens
from .micro_batch import lay_out_all
from .model import Policy
from .world import World

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from dvp_trainer.config import TrainSettings

PROMPTS = (1, 2, 4, 8, 12, 16, 24, 32)
"""Lengths of the prompts, in tokens."""
T = 8
MAX_TOKENS = 4096
"""Most tokens of a forward."""


class CanaryMaker:
    """Remembers the walks of the last version: they are the guess for the next one."""

    def __init__(self, policy: Policy, settings: TrainSettings, pad_id: int, world: World) -> None:
        self._policy, self._pad_id, self._world = policy, pad_id, world
        self._sampling = settings.sampling
        self._dtype = coarser(settings.model.compute_dtype, settings.weights.dtype)
        config, draw = policy.model.config, torch.Generator().manual_seed(0)
        context = min(model_context(config) or MAX_TOKENS, policy.shape.length if policy.shape else MAX_TOKENS)
        vocab = policy.model.get_input_embeddings().weight.shape[0]
        # Low ids stand for text even where others stand for images.
        prompts = [torch.randint(2, min(vocab, 1024), (length,), generator=draw).numpy() for length in PROMPTS]
        self._prompts = [prompt for prompt in prompts if len(prompt) + T <= context]
        self._guess = np.zeros((len(self._prompts), T), np.int64)

    def write(self, folder: Path) -> None:
        """The leader writes the canary of the current weights. Every rank must call this. Raises OSError, and
        ConfigError as `make` does."""
        canary = self.make()
        if canary is not None and self._world.leads:
            (folder / CANARY_NAME).write_text(canary.model_dump_json())

    @torch.no_grad()
    def make(self) -> Canary | None:
        """None if the context is too short for any walk. Every rank must call this. Raises ConfigError if the weights
        do not give finite log-probs."""
        if not self._prompts:
            return None
        for _ in range(T + 1):
            logits = self._read()
            best = logits.argmax(-1).view(-1, T).cpu().numpy()
            wrong, self._guess = best != self._guess, best
            if not self._world.max(int(wrong.any())):
                break
        top = logits.topk(2).values
        logprobs, gaps = top[:, 0] - logits.logsumexp(-1), top[:, 0] - top[:, 1]
        if not logprobs.isfinite().all() or not gaps.isfinite().all():
            raise ConfigError("the model gives log-probs that are not finite; its weights are not published")
        kept = self._kept(logits[::T])
        return Canary(
            dtype=self._dtype,
            log_min_p=self._sampling.log_min_p,
            temperature=self._sampling.temperature,
            walks=tuple(
                Walk(prompt_ids=prompt.tolist(), token_ids=ids[:end], logprobs=p[:end], gaps=gap[:end], kept=range_)
                for prompt, ids, p, gap, range_, end in zip(
                    self._prompts,
                    best.tolist(),
                    logprobs.view(-1, T).tolist(),
                    gaps.view(-1, T).tolist(),
                    kept,
                    # Two tokens may tie, and forwards disagree on the better one. What follows is not of one walk.
                    np.where(wrong.any(1), wrong.argmax(1) + 1, T).tolist(),
                    strict=True,
                )
            ),
        )

    def _read(self) -> Float[Tensor, "W*T V"]:
        """The logits that predict each token of the guess."""
        everything = np.ones(T, bool)
        sequences = [Tokens(prompt, ids, everything) for prompt, ids in zip(self._prompts, self._guess, strict=True)]
        limit, device = self._policy.limit(MAX_TOKENS), self._policy.model.device
        layouts = lay_out_all(sequences, limit, pad_id=self._pad_id, device=device)
        logits = torch.cat([self._policy.logits(layout) for layout in layouts])
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _kept(self, logits: Float[Tensor, "W V"]) -> list[tuple[int, int]]:
        """Fewest and most tokens that the run's policy may keep."""
        below, moved = logits.amax(-1, keepdim=True) - logits, margin(self._dtype)
        threshold = -self._sampling.log_min_p * self._sampling.temperature
        fewest, most = ((below <= threshold + by).sum(-1).tolist() for by in (-moved, moved))
        return [(max(1, low), high) for low, high in zip(fewest, most, strict=True)]
