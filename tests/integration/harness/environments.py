"""Environments as users would write them, good ones and bad ones."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from openai import AsyncOpenAI

from dvp_rl.harness import Endpoint, Step, Tools


class Sums:
    """Asks for one sum after another. The reward of each is 0.5."""

    def __init__(self) -> None:
        self.turns = 0

    async def reset(self, row: dict[str, Any]) -> list[dict[str, str]]:
        sys.stdout.write("environments may print\n")
        return [{"role": "user", "content": row.get("prompt", "1+1=")}]

    async def step(self, message: dict[str, Any]) -> Step:
        assert message["role"] == "assistant"
        self.turns += 1
        metrics = {"second": self.turns - 1}
        return Step([{"role": "user", "content": "2+2="}], reward=0.5, done=self.turns == 2, metrics=metrics)


class Uneven(Sums):
    """Its rewards differ a little, so that every group has a signal."""

    async def step(self, message: dict[str, Any]) -> Step:
        return (await super().step(message))._replace(reward=0.5 + random.random() / 100)


class Plain:
    """Nothing is async, nothing is rewarded, and a plain tuple will do."""

    def reset(self, row: dict[str, Any]) -> list[dict[str, str]]:
        return [{"role": "user", "content": "1+1="}]

    def step(self, message: dict[str, Any]) -> tuple[Any, ...]:
        return ([], None, True)


class Chatty(Sums):
    """Prints what is no text, and fails later."""

    async def reset(self, row: dict[str, Any]) -> list[dict[str, str]]:
        sys.stdout.buffer.write(b"environments may print \xff\n")
        return await super().reset(row)

    async def step(self, message: dict[str, Any]) -> Step:
        raise ValueError("see: dvp-harness: error: no more sums")


class Insistent(Sums):
    """Says two things at once, which not every chat template takes."""

    async def step(self, message: dict[str, Any]) -> Step:
        return Step([{"role": "user", "content": "2+2="}] * 2)


class Game(Sums):
    """An environment, in spite of its method `play`."""

    def play(self, move: str) -> None:
        raise NotImplementedError


class Careless(Plain):
    """Leaves a process behind that holds what it inherits. Fails to close."""

    def reset(self, row: dict[str, Any]) -> list[dict[str, str]]:
        left = subprocess.Popen(["sleep", "600"], start_new_session=True)
        Path(os.environ["LEFT_BEHIND"]).write_text(str(left.pid))
        return super().reset(row)

    def close(self) -> None:
        raise ValueError("cannot close")


class Endless(Plain):
    def step(self, message: dict[str, Any]) -> tuple[Any, ...]:
        return ([{"role": "user", "content": "go on"}], 0.25)


class Silent(Plain):
    def reset(self, row: dict[str, Any]) -> list[dict[str, str]]:
        return []


def tell_pid(name: str) -> None:
    """Writes a file that is whole once it exists."""
    partial = Path(f"{name}.partial")
    partial.write_text(str(os.getpid()))
    partial.rename(name)


class Uncaught(BaseException):
    pass


class Moody(Plain):
    """Fails as the row's prompt says."""

    def reset(self, row: dict[str, Any]) -> list[dict[str, str]]:
        self.mood = row["prompt"]
        return super().reset(row)

    def step(self, message: dict[str, Any]) -> Any:
        match self.mood:
            case "raise":
                raise ValueError("no more sums")
            case "exit":
                raise SystemExit
            case "die":
                os._exit(3)
            case "wait":
                time.sleep(600)
            case "hang":
                while True:
                    with suppress(BaseException):
                        time.sleep(600)
            case "grow":
                return [bytes(1 << 40)]
            case "nothing":
                return None
            case "much":
                return Step([{"role": "user", "content": "more"}], reward=1.7e308)
            case "nan":
                return Step(reward=float("nan"))
            case "names":  # new ones in each step
                self.named = 10 + getattr(self, "named", 0)
                return Step([{"role": "user", "content": "more"}], metrics={f"m{self.named + i}": 1 for i in range(10)})
            case "unnamed":
                return Step(metrics={"Tool errors": 1})
            case "uncounted":
                return Step(metrics={"luck": "much"})  # type: ignore[dict-item]
            case "recounted":
                return Step(metrics={"turns": 1})
            case "endless":
                return Step(metrics={"luck": 10**400})
            case "scored":
                return Step([], None, True, 0.5)  # type: ignore[arg-type]
            case "role":
                return Step([{"role": "robot", "content": "beep"}])
            case "other":
                return {"reward": 1.0}
            case "base":
                raise Uncaught("from below")
            case "surrogate":
                raise ValueError("not \ud800 text")
            case "fork":  # and let the child return
                if os.fork():
                    os.wait()
            case "escape":  # with the pipes, and hang
                signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
                if os.fork() == 0:
                    os.setsid()
                    tell_pid("escaped")
                time.sleep(600)
            case "leave":  # a child behind that holds the pipes
                if os.fork() == 0:
                    tell_pid("left")
                    time.sleep(600)
                while not Path("left").exists():
                    time.sleep(0.01)
                os._exit(3)
            case "open":
                Path("closed").write_text("no")
        return Step(reward=1.0, done=True)

    def close(self) -> None:
        if self.mood == "open":
            Path("closed").write_text("yes")
        if self.mood == "stuck":
            raise ValueError("will not close")


def slow(seconds: float) -> str:
    time.sleep(seconds)
    return "done"


async def gently(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


class WithTools(Plain):
    tools = Tools(slow, gently)

    async def step(self, message: dict[str, Any]) -> Step:
        return Step(await self.tools.run(message), reward=1.0, done=True)


class Counting(Plain):
    """Has new tools each time. Loses count of the errors in its second step."""

    def __init__(self) -> None:
        self.lost: dict[str, float] = {}

    @property
    def tools(self) -> Tools:
        return Tools(gently)

    async def step(self, message: dict[str, Any]) -> Step:
        observed = await self.tools.run(message)
        metrics, self.lost = self.lost, {"tool_errors": 9}
        return Step(observed, metrics={"luck": np.float32(1.0 if metrics else 0.5)} | metrics)


class Unwrapped(Plain):
    tools: ClassVar[list[Any]] = [slow]


class NoStep:
    def reset(self, row: dict[str, Any]) -> list[Any]:
        return []


class WithArguments(Plain):
    def __init__(self, size: int) -> None:
        self.size = size


def made() -> Plain:
    return Plain()


class Asking:
    """An agent: asks twice, with OpenAI's client."""

    async def play(self, row: dict[str, Any], endpoint: Endpoint) -> Step | float | None:
        messages: list[Any] = [{"role": "user", "content": "1+1="}]
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model=endpoint.model, messages=messages)
                messages += [answer.choices[0].message, {"role": "user", "content": "2+2="}]
        return self.end(row)

    def end(self, row: dict[str, Any]) -> Step | float | None:
        return Step(reward=0.5, done=True, metrics={"asked": 2})


class Half(Asking):
    def end(self, row: dict[str, Any]) -> Step | float | None:
        return 0.25


class CutOff(Asking):
    def end(self, row: dict[str, Any]) -> Step | float | None:
        return Step(reward=0.5)


class Napping:
    """An agent that takes longer than one turn may. Of two tools that run at once, one takes too long."""

    async def play(self, row: dict[str, Any], endpoint: Endpoint) -> float:
        def use(seconds: float) -> Awaitable[list[dict[str, Any]]]:
            call = {"id": "1", "function": {"name": "gently", "arguments": json.dumps({"seconds": seconds})}}
            return WithTools.tools.run({"tool_calls": [call]})

        _, (observation,) = await asyncio.gather(use(0), use(600))
        await asyncio.sleep(2)
        return 0.25 if observation["content"] == "error: this took too long" else 0.0


class Threaded:
    """An agent that uses its tools in a thread."""

    async def play(self, row: dict[str, Any], endpoint: Endpoint) -> float:
        call = {"id": "1", "function": {"name": "gently", "arguments": '{"seconds": 0}'}}
        (observation,) = await asyncio.to_thread(asyncio.run, WithTools.tools.run({"tool_calls": [call]}))
        return float(observation["content"] == "done")


class Tupled:
    def play(self, row: dict[str, Any], endpoint: Endpoint) -> Any:
        return 0.0, 0.5


class Talking:
    def play(self, row: dict[str, Any], endpoint: Endpoint) -> Any:
        return Step([{"role": "user", "content": "2+2="}], reward=0.5)


class Mute:
    """An agent that asks nothing."""

    def play(self, row: dict[str, Any], endpoint: Endpoint) -> float:
        return 1.0


class Failing(Asking):
    def end(self, row: dict[str, Any]) -> Step | float | None:
        raise ValueError("no more sums")


class Sleeping(Asking):
    def end(self, row: dict[str, Any]) -> Step | float | None:
        time.sleep(600)
        return None
