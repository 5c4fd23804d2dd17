"""The environment of the demo's second task: a sum of several numbers, and a calculator that takes two."""

from __future__ import annotations

from typing import Any

from dvp_rl.harness import Step, Tools

COST_OF_ERROR = 0.25


def add(a: int, b: int) -> int:
    """a + b"""
    return a + b


def sub(a: int, b: int) -> int:
    """a - b"""
    return a - b


class Calculator:
    """The reward is 1 for the right result, less COST_OF_ERROR for each call that failed."""

    tools = Tools(add, sub)

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        self.answer = row["answer"]
        return [{"role": "user", "content": row["prompt"]}]

    async def step(self, message: dict[str, Any]) -> Step:
        if results := await self.tools.run(message):
            failed = sum(result["content"].startswith("error") for result in results)
            return Step(results, reward=-COST_OF_ERROR * failed)
        return Step(reward=float(message["content"] == self.answer), done=True)
