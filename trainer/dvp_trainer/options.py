"""Options of the settings. This module must not need torch."""

from __future__ import annotations

from enum import StrEnum


class RewardName(StrEnum):
    """Reward functions of this project: see `data/rewards.py`."""

    MATH = "math"
    EXACT_MATCH = "exact_match"
    ARITHMETIC = "arithmetic"
    GIVEN = "given"


class OnError(StrEnum):
    """Treatment of a sample whose reward function failed."""

    ZERO = "zero"
    """Its reward is 0, and the failure is counted. The run stops only if every sample of a batch fails."""
    STOP = "stop"
    """The run stops with the error; it can be resumed."""


class Overlong(StrEnum):
    """Treatment of samples that max_tokens cut off. Of an episode, the last turn counts."""

    KEEP = "keep"
    """They keep the reward of the reward function."""
    SOFT = "soft"
    """DAPO's soft overlong punishment is added to every reward: see `overlong_penalty`."""
    MASK = "mask"
    """DAPO's overlong filtering: they give no gradient, but count in the baseline of the others."""
    DROP = "drop"
    """They give no gradient and do not count in the baseline."""


class ExportForm(StrEnum):
    """What `dvp-train export` writes."""

    MERGED = "merged"
    """A whole model; adapters are merged into its weights."""
    ADAPTER = "adapter"
    """The adapter alone, in PEFT's format."""
