"""The process in which reward functions run: one JSON line in per chunk of requests, one JSON line out per request.
reward_pool.py starts it."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from dvp_rl.contract.errors import ConfigError
from dvp_rl.hooks import as_number
from dvp_rl.workers.child import Failure, Guard, Pipes, limit_memory
from dvp_rl.workers.limits import Limits

from .reward_forms import Request, RewardFunction
from .rewards import resolve_reward


class Outcome(NamedTuple):
    """What became of one completion."""

    value: float | None
    """Finite reward; None if the function failed."""
    error: str | None = None
    trace: str = ""
    """Traceback of the failure."""


def score(reward: RewardFunction, guard: Guard, request: Request) -> list[Outcome]:
    """One outcome per completion. The time limit applies to all of them together."""
    num = len(request["completions"])
    values = guard.call(lambda: reward(request), pieces=num)
    if isinstance(values, Failure):
        return [Outcome(None, *values)] * num
    return [_checked(guard, value) for value in values]


def _checked(guard: Guard, value: Any) -> Outcome:
    number = guard.call(lambda: as_number(value))  # a user's type can raise anything, too
    return Outcome(None, *number) if isinstance(number, Failure) else Outcome(number)


def main(name: str, given: tuple[float, int, str]) -> None:
    limits, pipes = Limits(*given), Pipes()
    try:
        reward = RewardFunction(name, resolve_reward(name))
    except ConfigError as refusal:
        return pipes.send({"error": str(refusal)})
    limit_memory(limits.memory_mib)
    pipes.send({"form": reward.form})
    guard = Guard(limits, __file__)
    for requests in pipes.requests():
        for request in requests:
            start = time.perf_counter()
            outcomes = score(reward, guard, request)
            pipes.send((outcomes, time.perf_counter() - start))
    return None
