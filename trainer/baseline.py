"""What advantages are measured from. Settings import this, so torch must not be needed for it."""

from __future__ import annotations

from enum import StrEnum


class Baseline(StrEnum):
    """What is subtracted from a sample's reward."""

    RLOO = "rloo"
    """Mean reward of the OTHER samples of the prompt, rejected ones included. Unbiased while nothing is rejected."""
    RLOO_WEIGHTED = "rloo_weighted"
    """Mean of the others that were kept, weighted by their importance weights."""
    GRPO = "grpo"
    """Mean of the whole group. Shrinks every advantage by (n - 1) / n against RLOO, and nothing else."""
    GRPO_STD = "grpo_std"
    """The same, divided by the group's standard deviation. Biased: prompts are weighted by 1 / std, so nearly solved
    and nearly hopeless ones weigh most (arXiv 2503.20783)."""
