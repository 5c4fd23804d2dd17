"""Rewards of the chaos runs, which differ among nearly all samples."""

from __future__ import annotations

import time
import zlib
from typing import Any

VERIFY_S = 0.02


def spread(completion: str, answer: str | None, *, prompt: str, extra: dict[str, Any]) -> float:
    """A reward in [0, 1) that cannot be learned, so that a run of any length keeps changing its weights."""
    return zlib.crc32(f"{prompt}{completion}".encode()) / 2**32


def slowly(completion: str, answer: str | None, *, prompt: str, extra: dict[str, Any]) -> float:
    """The same from a slow verifier, so that an hour makes thousands of versions, not tens of thousands."""
    time.sleep(VERIFY_S)
    return spread(completion, answer, prompt=prompt, extra=extra)
