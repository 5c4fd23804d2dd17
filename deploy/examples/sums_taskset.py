"""A taskset of verifiers: sums of two to four numbers, with a calculator. Nothing in it knows of dvp-rl.

It has its own module, which must be importable: verifiers finds tasksets by name, and starts the tools as a program.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class Calculator(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """a + b"""
        return str(a + b)

    @vf.tool
    async def sub(self, a: int, b: int) -> str:
        """a - b"""
        return str(a - b)


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self) -> Iterator[Sum]:
        rng = random.Random(0)
        for _ in range(1000):
            numbers = [rng.choice((-1, 1)) * rng.randint(10, 99) for _ in range(rng.randint(2, 4))]
            numbers[0] = abs(numbers[0])
            prompt = "".join(f"{number:+}" for number in numbers).removeprefix("+") + "="
            yield Sum(SumData(prompt=prompt, answer=str(sum(numbers))), self.config.task)

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [Calculator(vf.SharedToolsetConfig())]


if __name__ == "__main__":
    Calculator.run()
