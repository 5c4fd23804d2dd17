"""What the chaos runs are rewarded for: something that differs among nearly all samples."""

from __future__ import annotations

import time
import zlib
from typing import Any

VERIFY_S = 0.02


def spread(completion: str, answer: str | None, *, prompt: str, extra: dict[str, Any]) -> float:
    """In [0, 1), and nothing that could be learned: a run of any length goes on changing its weights."""
    return zlib.crc32(f"{prompt}{completion}".encode()) / 2**32


def slowly(completion: str, answer: str | None, *, prompt: str, extra: dict[str, Any]) -> float:
    """The same from a verifier that takes its time: an hour makes thousands of versions, not tens of thousands."""
    time.sleep(VERIFY_S)
    return spread(completion, answer, prompt=prompt, extra=extra)
