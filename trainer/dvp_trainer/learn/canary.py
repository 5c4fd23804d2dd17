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

from dvp_rl.contract.canary import CANARY_NAME, MARGINS, Canary, Walk, coarser
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
MAX_GAP = 1e4
"""Stands for the gap to a token that is impossible, in nats."""
MAX_TOKENS = 4096
"""Most tokens of a forward."""


class CanaryMaker:
    """Remembers the walks of the last version: they are the guess for the next one."""

    def __init__(self, policy: Policy, settings: TrainSettings, pad_id: int, world: World) -> None:
        self._policy, self._pad_id, self._world = policy, pad_id, world
        self._sampling = settings.sampling
        self._dtype = coarser(settings.model.compute_dtype, settings.weights.dtype)
        self._rounded = self._dtype != settings.model.compute_dtype
        config, draw = policy.model.config, torch.Generator().manual_seed(0)
        context = min(model_context(config) or MAX_TOKENS, policy.shape.length if policy.shape else MAX_TOKENS)
        vocab = policy.model.get_input_embeddings().weight.shape[0]
        # Special tokens, such as the place of an image, may need more than their id.
        named = [value for name, value in config.to_dict().items() if name.endswith(("_token_id", "_token_index"))]
        special = {token for value in named for token in (value if isinstance(value, list) else [value])}
        low = range(min(vocab, 1024))
        ordinary = torch.tensor([token for token in low if token not in special] or low)
        places = [torch.randint(len(ordinary), (length,), generator=draw) for length in PROMPTS]
        self._prompts = [ordinary[each].numpy() for each in places if len(each) + T <= context]
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
        logprobs, gaps = top[:, 0] - logits.logsumexp(-1), (top[:, 0] - top[:, 1]).clamp(max=MAX_GAP)
        if not logprobs.isfinite().all() or gaps.isnan().any():
            raise ConfigError("the model gives log-probs that are not finite; its weights are not published")
        kept = self._kept(logits[::T])
        return Canary(
            dtype=self._dtype,
            rounded=self._rounded,
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

    def _kept(self, logits: Float[Tensor, "W V"]) -> list[tuple[tuple[int, int], ...]]:
        """Fewest and most tokens that the run's policy may keep, by each of MARGINS."""
        below = logits.amax(-1, keepdim=True) - logits
        threshold = -self._sampling.log_min_p * self._sampling.temperature

        def num_within(nats: float) -> list[int]:
            return (below <= nats).sum(-1).clamp(min=1).tolist()

        ranges = [zip(num_within(threshold - m.nats), num_within(threshold + m.nats), strict=True) for m in MARGINS]
        return list(zip(*ranges, strict=True))
