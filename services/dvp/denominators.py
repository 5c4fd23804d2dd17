"""What the sum over sequences is divided by. Frameworks differ silently here, so it is a setting and is logged."""

from __future__ import annotations

from enum import StrEnum


class Denominator(StrEnum):
    ALL = "all"
    """Every sequence of the batch, dropped and rejected ones too. Dropping outside sequences then costs no bias."""
    KEPT = "kept"
    """Only sequences with a token that is trained on: rescales the step by 1 / P(keep)."""


def denominator(policy: Denominator, *, total: int, kept: int) -> int:
    """In sequences, of the whole batch (all micro-batches, all ranks, zero-advantage groups included in `total`).

    0 under `kept` when nothing was kept: such a batch makes no optimizer step, whatever the policy.
    """
    return total if policy is Denominator.ALL else kept
