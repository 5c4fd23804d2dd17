"""What the chaos runs are rewarded for: something that differs among nearly all samples."""

from __future__ import annotations

import zlib
from typing import Any


def spread(completion: str, answer: str | None, *, prompt: str, extra: dict[str, Any]) -> float:
    """In [0, 1), and nothing that could be learned: a run of any length goes on changing its weights."""
    return zlib.crc32(f"{prompt}{completion}".encode()) / 2**32
