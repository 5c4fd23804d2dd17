"""Takes a run's episodes and plays them, as many at a time as there are worker processes."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Never

from pydantic import ValidationError

from dvp_rl.cancellation import cancel, finished, race
from dvp_rl.client import calls
from dvp_rl.contract.errors import DvpError, EngineError, NotFoundError, RequestError
from dvp_rl.contract.http import EpisodeBody, FinishRequest
from dvp_rl.contract.openai import CONTEXT_FULL
from dvp_rl.contract.record import describe
from dvp_rl.contract.session import beat_every
from dvp_rl.workers.limits import Limits

from .environment import Endpoint, Step
from .process import EnvironmentFailedError, EnvironmentProcess
from .replicas import Replicas
from .settings import HarnessSettings

logger = logging.getLogger(__name__)

WAIT_S = 20.0
"""Time for which one call waits for an episode, in seconds."""
GIVE_BACK_S = 5.0
"""Longest time to give an episode back when the program ends, in seconds."""
NO_TOKEN = "none"
"""API key where the replicas want none: OpenAI's client needs one."""
MAX_SHOWN = 32
"""Different errors whose traceback is logged."""
REPORT_S = 60.0
"""Time between two lines about what was played, in seconds."""


@dataclass
class _Taken:
    episode: EpisodeBody
    home: int
    """Number of the replica that answered last. It is asked first: its engine may have the earlier turns cached."""
    is_drawing: bool = False
    """Whether a replica draws a turn: then the heartbeats are its own."""


class Harness:
    """Plays until its task is cancelled."""

    def __init__(self, settings: HarnessSettings, token: str) -> None:
        self._settings, self._token = settings, token
        self._limits = Limits(settings.timeout_s, settings.memory_mib)
        self._replicas = Replicas(settings.urls, token, settings.patience_s)
        self._firsts = count()
        self._taking = asyncio.Lock()
        self._ends = Counter[str]()
        self._num_rewarded, self._earned = 0, 0.0
        """Number of the rewards that were given, and their sum."""
        self._shown = set[str]()
        """Errors whose traceback was logged."""

    async def run(self) -> None:
        """Raises ConfigError if there is no such environment or the token is wrong, UnavailableError if no replica
        answers for too long."""
        async with self._replicas:
            tasks = [asyncio.create_task(self._slot()) for _ in range(self._settings.workers)]
            tasks.append(asyncio.create_task(self._report()))
            try:
                ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    task.result()
            finally:
                await cancel(tasks)

    async def _slot(self) -> None:
        environment = EnvironmentProcess(self._settings.environment, self._limits)
        try:
            await environment.start()
            while True:
                taken = await self._take()
                if taken is not None:
                    await self._play(taken, environment)
        finally:
            await environment.stop()

    async def _take(self) -> _Taken | None:
        async with self._taking:  # one call that waits is enough
            answer, home = await self._replicas.send(calls.take_episode(WAIT_S), next(self._firsts))
        return None if answer.root is None else _Taken(answer.root, home)

    async def _play(self, taken: _Taken, environment: EnvironmentProcess) -> None:
        """Plays an episode to its end, or gives it back with a reason."""
        session_id = taken.episode.session_id
        try:
            playing = self._ask_agent if environment.is_agent else self._turns
            end = await race(playing(taken, environment), self._beats(taken))
            await self._replicas.send(calls.finish_session(session_id, end), taken.home)
        except NotFoundError:
            self._ends["lost"] += 1
            logger.warning("episode %s was given to another harness, or its job has ended", _name(taken))
        except (EnvironmentFailedError, EngineError, RequestError) as error:
            self._ends["failed"] += 1
            logger.warning("episode %s cannot be played: %s%s", _name(taken), error, self._new_trace(error))
            with suppress(NotFoundError):
                await self._replicas.send(calls.delete_session(session_id, str(error)), taken.home)
        except BaseException:
            with suppress(DvpError, TimeoutError):
                await finished(self._give_back(taken))
            raise
        else:
            self._ends["cut off" if end.truncated else "finished"] += 1
            if end.reward is not None:
                self._num_rewarded, self._earned = self._num_rewarded + 1, self._earned + end.reward
        await self._close(environment)

    async def _ask_agent(self, taken: _Taken, agent: EnvironmentProcess) -> FinishRequest:
        """Lets it play to the end, and returns that."""
        episode = taken.episode
        base_url = f"{self._settings.urls[taken.home]}/v1/sessions/{episode.session_id}/v1"
        endpoint = Endpoint(base_url, self._token or NO_TOKEN, episode.run_id)
        end = await agent.play(episode.task, endpoint, pieces=self._settings.max_turns)
        return _end([end], truncated=not end.done)

    async def _turns(self, taken: _Taken, environment: EnvironmentProcess) -> FinishRequest:
        """Plays to the end, and returns that."""
        episode = taken.episode
        messages, tools = await environment.reset(episode.task)
        steps: list[Step] = []
        for turn in range(self._settings.max_turns):
            said = {"model": episode.run_id, "messages": messages, "tools": tools or None}
            call = calls.chat(episode.session_id, said, key=f"turn-{turn}")
            taken.is_drawing = True
            try:
                answer, taken.home = await self._replicas.send(call, taken.home)
            except RequestError as error:
                if error.code != CONTEXT_FULL or turn == 0:
                    raise
                break
            finally:
                taken.is_drawing = False
            message = answer.choices[0].message.model_dump(mode="json", exclude_none=True)
            step = await environment.step(message)
            steps.append(step)
            if step.done:
                return _end(steps)
            messages += [message, *step.messages]
        return _end(steps, truncated=True)

    async def _beats(self, taken: _Taken) -> Never:
        """Keeps an episode while its environment is busy. Raises NotFoundError once it was given to another harness, or
        its job has ended."""
        every_s, replica = beat_every(taken.episode.idle_s), taken.home
        pause_s = every_s
        while True:
            await asyncio.sleep(pause_s)
            call = (calls.session if taken.is_drawing else calls.beat_session)(taken.episode.session_id)
            pause_s = every_s
            try:
                async with asyncio.timeout(every_s):
                    await self._replicas.send(call, replica)
            except TimeoutError:  # the replica hangs
                replica, pause_s = replica + 1, 0.0
            except EngineError as error:  # the next one may be in time
                logger.warning("heartbeat of episode %s: %s", _name(taken), error)

    async def _give_back(self, taken: _Taken) -> None:
        async with asyncio.timeout(GIVE_BACK_S):
            await self._replicas.send(calls.delete_session(taken.episode.session_id), taken.home)

    def _new_trace(self, error: Exception) -> str:
        """The traceback of the error, on a line of its own, unless it was logged before."""
        trace = error.trace if isinstance(error, EnvironmentFailedError) else ""
        if not trace or str(error) in self._shown or len(self._shown) == MAX_SHOWN:
            return ""
        self._shown.add(str(error))
        return f"\n{trace}"

    async def _close(self, environment: EnvironmentProcess) -> None:
        try:
            await environment.close()
        except EnvironmentFailedError as error:
            logger.warning("%s%s", error, self._new_trace(error))

    async def _report(self) -> None:
        reported = Counter[str]()
        while True:
            await asyncio.sleep(REPORT_S)
            if self._ends != reported:
                logger.info("%s", self.summary())
                reported = self._ends.copy()

    def summary(self) -> str:
        """What became of the episodes, in words."""
        counts = ", ".join(f"{number} {end}" for end, number in sorted(self._ends.items()))
        mean = f"; mean reward {self._earned / self._num_rewarded:.3f}" if self._num_rewarded else ""
        return f"episodes: {counts or 'none'}{mean}"


def _name(taken: _Taken) -> str:
    return f"{taken.episode.index} of job {taken.episode.job_id}"


def _end(steps: Sequence[Step], *, truncated: bool = False) -> FinishRequest:
    """Sums rewards and metrics. Raises EnvironmentFailedError if a sum is not finite, or there are too many metrics."""
    rewards = [step.reward for step in steps if step.reward is not None]
    metrics = defaultdict[str, float](float)
    for step in steps:
        for name, value in step.metrics.items():
            metrics[name] += value
    try:
        return FinishRequest(reward=sum(rewards) if rewards else None, truncated=truncated, metrics=dict(metrics))
    except ValidationError as error:
        raise EnvironmentFailedError(describe("sums of all steps", error)) from None
