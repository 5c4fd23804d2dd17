"""Environments in a worker process, as the harness sees them."""

from __future__ import annotations

import json
from typing import Any

from dvp_rl.cancellation import finished
from dvp_rl.workers.child import SLACK_S
from dvp_rl.workers.limits import Limits
from dvp_rl.workers.process import WorkerLostError, WorkerProcess

from .environment import Endpoint, Step


class EnvironmentFailedError(Exception):
    """The environment raised, exceeded a limit or ended its process. `trace`: the traceback, if there is one."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


class EnvironmentProcess:
    """One process, for one episode at a time."""

    def __init__(self, name: str, limits: Limits) -> None:
        """`name`: module:Environment."""
        self._limits = limits
        self._process = WorkerProcess("dvp_rl.harness.worker", "environment", name, limits)
        self.is_agent = False
        """Whether it plays by itself; known once it was started."""

    async def start(self) -> None:
        """Raises ConfigError if there is no such environment."""
        try:
            self.is_agent = (await self._process.start())["is_agent"]
        except BaseException:
            await self.stop()  # its greeting would be taken for an answer
            raise

    async def reset(self, row: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        """The first messages of a new episode, and its tools. Replaces a process that has ended. Raises
        EnvironmentFailedError, or ConfigError as `start`."""
        answer = await self._begin("reset", row)
        return answer["messages"], answer["tools"]

    async def play(self, row: dict[str, Any], endpoint: Endpoint, *, pieces: int) -> Step:
        """A whole episode, of an agent; it may take `pieces` times the time limit. Raises as `reset`."""
        return Step(**await self._begin("play", (row, endpoint), pieces))

    async def step(self, message: dict[str, Any]) -> Step:
        """What the environment says to an answer of the model. Raises EnvironmentFailedError."""
        return Step(**await self._call("step", message, num_tools=len(message.get("tool_calls") or ())))

    async def close(self) -> None:
        """The end of the episode. Raises EnvironmentFailedError."""
        if self._process.is_alive():
            await self._call("close", None)

    async def stop(self) -> None:
        """Kills it. A cancellation is raised once it has ended."""
        await finished(self._process.stop())

    async def _begin(self, method: str, argument: object, pieces: int = 1) -> dict[str, Any]:
        if not self._process.is_alive():
            await self.stop()
            await self.start()
        return await self._call(method, argument, pieces)

    async def _call(self, method: str, argument: object, pieces: int = 1, num_tools: int = 0) -> dict[str, Any]:
        """The call may take `pieces` times the time limit. `num_tools`: calls of tools, each of which has one of its
        own."""
        self._process.send(json.dumps((method, argument, pieces)).encode())
        try:
            (answer,) = await self._process.receive((self._limits.timeout_s + SLACK_S) * (pieces + num_tools))
        except WorkerLostError as error:
            await self.stop()
            raise EnvironmentFailedError(f"{method}: {error}") from None
        except BaseException:
            await self.stop()  # its answer would be taken for that of the next call
            raise
        if "error" in answer:
            raise EnvironmentFailedError(f"{method}: {answer['error']}", answer["trace"])
        return dict(answer)
