"""What the method lets a user choose. Settings import this module, so it must not need torch."""

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


class Baseline(StrEnum):
    """What is subtracted from a sample's reward, to make its advantage."""

    RLOO = "rloo"
    """Mean reward of the OTHER samples of the prompt, rejected ones included. Unbiased while nothing is rejected."""
    RLOO_WEIGHTED = "rloo_weighted"
    """Mean of the others that were kept, weighted by their importance weights."""
    GRPO = "grpo"
    """Mean of the whole group. Shrinks every advantage by (n - 1) / n against RLOO, and nothing else."""
    GRPO_STD = "grpo_std"
    """The same, divided by the group's standard deviation. Biased: prompts are weighted by 1 / std, so nearly solved
    and nearly hopeless ones weigh most (arXiv 2503.20783)."""
