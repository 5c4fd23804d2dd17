"""The divisor D of the sum over sequences. Frameworks silently differ here, so it is a setting and is logged."""

from __future__ import annotations

from enum import StrEnum


class Denominator(StrEnum):
    ALL = "all"
    """All sequences of the batch, including dropped and rejected ones. Dropping outside sequences then adds no bias."""
    KEPT = "kept"
    """All sequences times the kept share P(keep), which rescales the step by 1 / P(keep)."""


def denominator(policy: Denominator, *, total: int, corrected: int, kept: int) -> float:
    """D in sequences, for one optimizer step (all micro-batches, all ranks).

    `total` counts every sequence, `corrected` those that got a weight, `kept` those of them with a token that is
    trained on. Groups without signal get no weight: they count only in `total` and do not affect the estimate of
    P(keep). D is 0 under `kept` if nothing was kept; then no optimizer step is made, under either policy.
    """
    return total if policy is Denominator.ALL else total * kept / max(corrected, 1)
