"""What settings let a user choose. Torch must not be needed for it."""

from __future__ import annotations

from enum import StrEnum


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


class OnError(StrEnum):
    """What becomes of a sample whose reward function failed."""

    ZERO = "zero"
    """It is worth 0 and counted."""
    STOP = "stop"
    """The run stops with the error; it can be resumed."""


class Overlong(StrEnum):
    """What becomes of samples that max_tokens cut off."""

    KEEP = "keep"
    """They are worth what the reward function says."""
    SOFT = "soft"
    """DAPO's soft overlong punishment is added to every reward: see `overlong_penalty`."""
    MASK = "mask"
    """DAPO's overlong filtering: no gradient from them, but they count in the baseline of the others."""
    DROP = "drop"
    """Neither a gradient nor a part in the baseline."""
