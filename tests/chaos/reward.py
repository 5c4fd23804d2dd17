"""Rewards of the chaos runs, which differ among nearly all samples, and an environment that gives them."""

from __future__ import annotations

import asyncio
import time
import zlib
from typing import Any

from dvp_rl.harness import Step

VERIFY_S = 0.02
TURNS = 3


def spread(completion: str, answer: str | None, *, prompt: str, extra: dict[str, Any]) -> float:
    """A reward in [0, 1) that cannot be learned, so that a run of any length keeps changing its weights."""
    return zlib.crc32(f"{prompt}{completion}".encode()) / 2**32


def slowly(completion: str, answer: str | None, *, prompt: str, extra: dict[str, Any]) -> float:
    """The same from a slow verifier, so that an hour makes thousands of versions, not tens of thousands."""
    time.sleep(VERIFY_S)
    return spread(completion, answer, prompt=prompt, extra=extra)


class Dialogue:
    """Asks TURNS times; the reward is that of all that was answered."""

    async def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        self._answers: list[str] = []
        return [{"role": "user", "content": row["prompt"]}]

    async def step(self, message: dict[str, Any]) -> Step:
        await asyncio.sleep(VERIFY_S)
        self._answers.append(message["content"])
        reward = spread("".join(self._answers), None, prompt="", extra={})
        if len(self._answers) == TURNS:
            return Step([], reward=reward, done=True)
        return Step([{"role": "user", "content": "2+2="}])
