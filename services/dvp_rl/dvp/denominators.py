"""What the sum over sequences is divided by. Frameworks differ silently here, so it is a setting and is logged."""

from __future__ import annotations

from enum import StrEnum


class Denominator(StrEnum):
    ALL = "all"
    """Every sequence of the batch, dropped and rejected ones too. Dropping outside sequences then costs no bias."""
    KEPT = "kept"
    """The share of every sequence that was kept: rescales the step by 1 / P(keep)."""


def denominator(policy: Denominator, *, total: int, corrected: int, kept: int) -> float:
    """In sequences, of the whole batch (all micro-batches, all ranks).

    `total` counts every sequence, `corrected` those that got a weight, `kept` those of them with a token that is
    trained on. Groups without signal get no weight: they count in `total` alone, and cannot say anything of P(keep).
    0 under `kept` when nothing was kept: such a batch makes no optimizer step, whatever the policy.
    """
    return total if policy is Denominator.ALL else total * kept / max(corrected, 1)
