"""A puzzle of reasoning-gym as an environment: its questions and its scores, with a calculator for the model."""

from __future__ import annotations

from typing import Any

from reasoning_gym import create_dataset
from reasoning_gym.factory import ProceduralDataset

from dvp_rl.harness import Step, Tools

PUZZLE = create_dataset("chain_sum", seed=1, size=4000, min_terms=2, max_terms=4, min_digits=2, max_digits=2)


def rows(*, split: str, subset: str | None) -> ProceduralDataset:
    """A row is an entry of the dataset: its `question`, its `answer` and its `metadata`."""
    return PUZZLE


def add(a: int, b: int) -> int:
    """a + b"""
    return a + b


def sub(a: int, b: int) -> int:
    """a - b"""
    return a - b


class GymSums:
    tools = Tools(add, sub)

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        self.entry = row["columns"] | {"answer": row["answer"]}
        # The demo's model was taught on "12+34-56=". Ask a language model the question itself, row["prompt"].
        expression = self.entry["metadata"]["expression"]
        return [{"role": "user", "content": expression.replace(" ", "") + "="}]

    async def step(self, message: dict[str, Any]) -> Step:
        if results := await self.tools.run(message):
            return Step(results)
        return Step(reward=PUZZLE.score_answer(message["content"], self.entry), done=True)
