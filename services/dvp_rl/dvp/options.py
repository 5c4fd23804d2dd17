"""What the correction lets a user choose. Settings import this, so torch must not be needed for it."""

from __future__ import annotations

from enum import StrEnum


class Level(StrEnum):
    """What one weight covers. Only `sequence` is unbiased; the others are biased even without rejection."""

    SEQUENCE = "sequence"
    """exp(sum_t l_t): the product over the sequence."""
    TOKEN = "token"
    """exp(l_t) for each token."""
    GEOMETRIC = "geometric"
    """exp(mean_t l_t)."""


class Mode(StrEnum):
    """What becomes of a weight w out of bounds."""

    NONE = "none"
    """w as it is: unbiased at sequence level, unbounded variance."""
    TIS = "tis"
    """Truncated to the bound."""
    MIS = "mis"
    """Masked: weight 0."""
    UNIT = "unit"
    """No importance weight: 1 whatever w is. The baseline that ignores the mismatch."""


class Bounds(StrEnum):
    """Which reading of MIS: the blog's, or verl 0.6's."""

    UPPER = "upper"
    """w <= C."""
    TWO_SIDED = "two_sided"
    """1 / C <= w <= C."""
