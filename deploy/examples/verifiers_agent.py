"""An agent that plays the tasks of a verifiers taskset: loop, tools and rewards are those of verifiers."""

from __future__ import annotations

import os
import sysconfig
from contextlib import AsyncExitStack
from typing import Any

import verifiers.v1 as vf

from dvp_rl.harness import Endpoint, Step

ENV = vf.SingleAgentEnv(
    vf.SingleAgentEnvConfig(
        taskset={"id": "sums_taskset"},
        # "null" talks to the model and runs tools; on this machine, as the tools do nothing but add.
        agent={"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
    )
)
EPISODES_PER_START = 200
# verifiers starts its programs with uv. It would download one if that of this environment were not found.
os.environ["PATH"] = os.pathsep.join((sysconfig.get_path("scripts"), os.environ["PATH"]))


def rows(*, split: str, subset: str | None) -> list[dict[str, Any]]:
    return [{"prompt": task.data.prompt, "task": task.data.idx} for task in ENV.taskset]


class Verifiers:
    _serving = AsyncExitStack()
    _episodes_left = 0

    async def play(self, row: dict[str, Any], endpoint: Endpoint) -> Step:
        await self._serve()
        os.environ["DVP_API_KEY"] = endpoint.api_key  # verifiers withholds API_KEYs from what the model runs
        client = vf.EvalClientConfig(base_url=endpoint.base_url, api_key_var="DVP_API_KEY")
        (task,) = ENV.taskset.include(idx=[row["columns"]["task"]])
        episode = await ENV.run_episode(task, vf.ModelContext(endpoint.model, client))
        if not episode.ok:
            raise RuntimeError(str([*episode.errors, *(error for trace in episode.traces for error in trace.errors)]))
        (trace,) = episode.traces
        return Step(reward=trace.reward, done=not trace.is_truncated, metrics=trace.metrics)

    @classmethod
    async def _serve(cls) -> None:
        """Starts the tools, which takes seconds, for many episodes. Not for all: verifiers keeps a connection to each
        endpoint until they end, and every episode has an endpoint of its own."""
        if not cls._episodes_left:
            await cls._serving.aclose()
            await cls._serving.enter_async_context(ENV.serving())
            cls._episodes_left = EPISODES_PER_START
        cls._episodes_left -= 1
