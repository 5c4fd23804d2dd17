"""The method's options. Settings import this module, so it must not need torch."""

from __future__ import annotations

from enum import StrEnum


class Level(StrEnum):
    """The span that one weight covers. Only `sequence` is unbiased; the others are biased even without rejection."""

    SEQUENCE = "sequence"
    """exp(sum_t l_t): the product over the sequence."""
    TOKEN = "token"
    """exp(l_t) for each token."""
    GEOMETRIC = "geometric"
    """exp(mean_t l_t)."""


class Mode(StrEnum):
    """Treatment of a weight w that is out of bounds."""

    NONE = "none"
    """w unchanged: unbiased at sequence level, with unbounded variance."""
    TIS = "tis"
    """Truncated to the bound."""
    MIS = "mis"
    """Masked: weight 0."""
    UNIT = "unit"
    """No importance weight: 1 for any w. The baseline that ignores the mismatch."""


class Bounds(StrEnum):
    """Which bounds apply to w: those of the MIS blog post, or those of verl 0.6."""

    UPPER = "upper"
    """w <= C."""
    TWO_SIDED = "two_sided"
    """1 / C <= w <= C."""


class Baseline(StrEnum):
    """The baseline that is subtracted from a sample's reward to give its advantage."""

    RLOO = "rloo"
    """Mean reward of the OTHER samples of the prompt, rejected ones included. Unbiased while nothing is rejected."""
    RLOO_WEIGHTED = "rloo_weighted"
    """Mean of the other samples that were kept, weighted by their importance weights."""
    GRPO = "grpo"
    """Mean of the whole group. Its only effect against RLOO: every advantage is scaled by (n - 1) / n."""
    GRPO_STD = "grpo_std"
    """As `grpo`, divided by the group's standard deviation. Biased: prompts are weighted by 1 / std, so nearly solved
    and nearly hopeless ones weigh most (arXiv 2503.20783)."""
