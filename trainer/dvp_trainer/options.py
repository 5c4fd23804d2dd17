"""What settings let a user choose. Torch must not be needed for it."""

from __future__ import annotations

from enum import StrEnum


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
