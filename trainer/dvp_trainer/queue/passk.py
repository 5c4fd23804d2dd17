"""Held-out scores: avg@k, pass@k and the truncated share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dvp_rl.contract.errors import ConfigError


@dataclass(frozen=True)
class HeldOutScore:
    """Scores over P prompts with n samples each."""

    num_prompts: int
    n: int
    avg: float
    """avg@n: mean reward of all samples."""
    stderr: float | None
    """Standard error of `avg`, were the prompts drawn anew; None with one prompt."""
    pass_at: dict[int, float]
    """k -> probability that at least one of k samples is correct, averaged over prompts."""
    truncated_share: float
    """Share of samples that max_tokens cut off."""
    correct_from: float = 1.0
    """Lowest reward of a correct sample."""

    def metrics(self) -> dict[str, float]:
        threshold = "" if self.correct_from == 1 else f"_from_{self.correct_from:g}"
        passes = {f"heldout/pass_at_{k}{threshold}": value for k, value in self.pass_at.items()}
        error = {} if self.stderr is None else {"heldout/stderr": self.stderr}
        return {
            f"heldout/avg_at_{self.n}": self.avg,
            **error,
            **passes,
            "heldout/truncated_share": self.truncated_share,
        }


def pass_at_k(n: int, num_correct: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k), unbiased for the probability of at least one correct sample in k (arXiv 2107.03374,
    eq. 1). Raises ConfigError unless 1 <= k <= n."""
    if not 1 <= k <= n:
        raise ConfigError(f"pass@k: k = {k} with n = {n} samples per prompt; allowed: 1 <= k <= n")
    return 1.0 - math.comb(n - num_correct, k) / math.comb(n, k)


def default_ks(n: int) -> tuple[int, ...]:
    """Powers of 2 up to n, and n itself."""
    return tuple(sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n}))


def score_held_out(
    rewards: Sequence[Sequence[float]],
    truncated: Iterable[bool] = (),
    *,
    ks: Sequence[int] | None = None,
    correct_from: float = 1.0,
) -> HeldOutScore:
    """Scores of `rewards` [P, n]; a reward of at least `correct_from` is correct. `truncated`: one flag per sample.
    Raises ConfigError if there is no reward."""
    table = np.asarray(rewards, np.float64)
    if table.ndim != 2 or table.size == 0:
        raise ConfigError(f"held-out rewards of shape {table.shape}; expected [prompts, samples], at least one of each")
    num_prompts, n = table.shape
    correct = (table >= correct_from).sum(1)
    passes = {k: float(np.mean([pass_at_k(n, int(c), k) for c in correct])) for k in ks or default_ks(n)}
    flags = list(truncated)
    cut = float(np.mean(flags)) if flags else 0.0
    stderr = float(table.mean(1).std(ddof=1)) / math.sqrt(num_prompts) if num_prompts > 1 else None
    return HeldOutScore(num_prompts, n, float(table.mean()), stderr, passes, cut, correct_from)
