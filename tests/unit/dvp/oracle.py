"""Independent implementation of the method in float64 NumPy, by complete enumeration. Imports nothing from services.

Only the set is decided as in the implementation (float32 for logits of at most float32, float64 otherwise), so that
exact ties agree; everything else is float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Policy(NamedTuple):
    keep: NDArray[np.bool_]
    logprobs: Floats
    """-inf off the set."""
    kept_mass: Floats
    kept_count: NDArray[np.int64]
    outside_logprob: Floats


def policy(logits: NDArray[np.floating], log_min_p: float, temperature: float) -> Policy:
    """The constrained policy of float32 or float64 logits [.., V]."""
    d = logits - logits.max(-1, keepdims=True)
    keep = d >= logits.dtype.type(np.float64(temperature) * np.float64(log_min_p))
    z = logits.astype(np.float64) / temperature
    top = z.max(-1, keepdims=True)
    kept = np.where(keep, np.exp(z - top), 0.0).sum(-1, keepdims=True)
    total = np.exp(z - top).sum(-1, keepdims=True)
    log_normalizer = top + np.log(kept)
    return Policy(
        keep,
        np.where(keep, z - log_normalizer, -np.inf),
        (kept / total)[..., 0],
        keep.sum(-1),
        (top - 50.0 - log_normalizer)[..., 0],
    )


class Tree(NamedTuple):
    """All sequences of at most `horizon` tokens over a tiny vocabulary; token 0 ends a sequence. logits[i] belongs to
    the i-th prefix of `prefixes`."""

    vocab: int
    horizon: int

    def prefixes(self) -> list[tuple[int, ...]]:
        inner = range(1, self.vocab)
        return [p for length in range(self.horizon) for p in itertools.product(inner, repeat=length)]

    def sequences(self) -> Iterator[tuple[int, ...]]:
        for prefix in self.prefixes():
            yield (*prefix, 0)
            if len(prefix) == self.horizon - 1:
                yield from ((*prefix, token) for token in range(1, self.vocab))


def bounded_weights(logs: Floats, level: str, mode: str, bounds: str, cap: float) -> Floats:
    """One weight per token of one sequence, after truncation or rejection."""
    match level:
        case "sequence":
            logs = np.full_like(logs, logs.sum())
        case "geometric":
            logs = np.full_like(logs, logs.mean())
    w = np.exp(np.clip(logs, -20, 20))
    low = 1 / cap if bounds == "two_sided" else 0.0
    match mode:
        case "mis":
            return np.where((w <= cap) & (w >= low), w, 0.0)
        case "tis":
            return np.clip(w, low, cap)
        case "unit":
            return np.ones_like(w)
    return w


def expected_gradient(
    tree: Tree,
    train_logits: Floats,
    infer_logits: Floats,
    rewards: dict[tuple[int, ...], float],
    *,
    train_log_min_p: float,
    infer_log_min_p: float,
    temperature: float,
    level: str,
    mode: str,
    bounds: str,
    cap: float,
    log_veto: float,
) -> Floats:
    """sum_y pi_infer_mp(y) sum_t w_t R(y) d log pi_train_mp(y_t) / d train_logits, without vetoed sequences."""
    train = policy(train_logits, train_log_min_p, temperature)
    infer = policy(infer_logits, infer_log_min_p, temperature)
    index = {prefix: i for i, prefix in enumerate(tree.prefixes())}
    gradient = np.zeros_like(train_logits)
    for y in tree.sequences():
        nodes = [index[y[:t]] for t in range(len(y))]
        probability = math.exp(infer.logprobs[nodes, y].sum())
        if probability == 0.0 or not train.keep[nodes, y].all():
            continue
        logs = train.logprobs[nodes, y] - infer.logprobs[nodes, y]
        if (logs < log_veto).any():
            continue
        for node, token, w in zip(nodes, y, bounded_weights(logs, level, mode, bounds, cap), strict=True):
            score = (np.eye(tree.vocab)[token] - np.exp(train.logprobs[node])) / temperature
            gradient[node] += probability * w * rewards[y] * score
    return gradient
