"""A reward that a model learns from scratch within a few steps, for both sides of the comparison with TRL."""

from __future__ import annotations

import re
from typing import Any

TOKEN = re.compile(r"w(\d+)|.", re.DOTALL)


def even_words(completion: str, answer: str | None, /, *, prompt: str, extra: dict[str, Any]) -> float:
    """Share of a completion's tokens that are words `w<i>` with an even i: about a half of them by chance."""
    numbers = [match[1] for match in TOKEN.finditer(completion)]
    return sum(number is not None and int(number) % 2 == 0 for number in numbers) / max(len(numbers), 1)
