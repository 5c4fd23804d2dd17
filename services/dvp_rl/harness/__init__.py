"""Environments: what a user writes, and `dvp-harness`, which plays a run's episodes in them.

class Sum:
    tools = Tools(add)

    async def reset(self, row):
        return [{"role": "user", "content": row["prompt"]}]

    async def step(self, message):
        if "tool_calls" in message:
            return Step(await self.tools.run(message))
        return Step(reward=float(message["content"] == row["answer"]), done=True)
"""

from .environment import Environment, Step
from .tools import Tools

__all__ = ["Environment", "Step", "Tools"]
