"""The process in which environments run, one after the other: one JSON line in and one out per call. process.py starts
it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dvp_rl.contract.errors import ConfigError
from dvp_rl.contract.metrics import TOOL_CALLS, TOOL_ERRORS, Metrics
from dvp_rl.contract.openai import ChatMessage, Tool
from dvp_rl.contract.record import describe
from dvp_rl.hooks import as_number, describe_type, load_hook
from dvp_rl.workers.child import Failure, Guard, Loop, Pipes, limit_memory
from dvp_rl.workers.limits import Limits

from .environment import Endpoint, Step
from .tools import Tools

SETTING = "environment"
MESSAGES = TypeAdapter(list[ChatMessage])
TOOLS = TypeAdapter(list[Tool])
METRICS = TypeAdapter[dict[str, float]](Metrics)


class Stage:
    """Holds the environment of the episode that is played."""

    def __init__(self, create: Callable[[], Any]) -> None:
        self._create = create
        self._loop = Loop()
        self._environment: Any = None
        self._tools: Any = ()

    def reset(self, row: dict[str, Any]) -> dict[str, Any]:
        self._environment = self._create()
        messages = self._loop.finished(self._environment.reset(row))
        tools = self._tools = getattr(self._environment, "tools", None) or ()
        return {
            "messages": _checked(MESSAGES, "messages", messages),
            "tools": _checked(TOOLS, "tools", tools.definitions if isinstance(tools, Tools) else tools),
        }

    def step(self, message: dict[str, Any]) -> dict[str, Any]:
        errors_before = Tools.num_errors
        result = self._loop.finished(self._environment.step(message))
        if not isinstance(result, tuple):
            raise TypeError(f"returned {describe_type(result)}, expected a Step")
        counted = dict[str, float]()
        if self._tools:
            counted[TOOL_CALLS] = len(message.get("tool_calls") or ())
        if isinstance(self._tools, Tools):
            counted[TOOL_ERRORS] = Tools.num_errors - errors_before
        return _as_json(Step(*result), counted)

    def play(self, given: tuple[dict[str, Any], list[str]]) -> dict[str, Any]:
        row, endpoint = given
        self._environment = self._create()
        result = self._loop.finished(self._environment.play(row, Endpoint(*endpoint)))
        if not isinstance(result, tuple):
            result = Step(reward=result, done=True)
        if not isinstance(result, Step) or result.messages:
            raise TypeError("returned a tuple, expected a number or a Step without messages")
        return _as_json(result, {})

    def close(self, _: None) -> dict[str, Any]:
        environment, self._environment = self._environment, None
        close = getattr(environment, "close", None)
        if close is not None:
            self._loop.finished(close())
        return {}


def _as_json(step: Step, counted: dict[str, float]) -> dict[str, Any]:
    """`counted`: metrics that were counted for the user. Raises TypeError or ValueError."""
    return {
        "messages": _checked(MESSAGES, "messages", step.messages or ()),
        "reward": None if step.reward is None else as_number(step.reward),
        "done": bool(step.done),
        "metrics": _metrics(counted, step.metrics),
    }


def _checked(adapter: TypeAdapter[Any], what: str, given: Any) -> Any:
    """What was given, as JSON. Raises TypeError or ValueError."""
    if isinstance(given, (str, Mapping)):
        raise TypeError(f"{what}: expected a list, got {describe_type(given)}")
    try:
        checked = adapter.validate_python(list(given))
    except ValidationError as error:
        raise ValueError(describe(what, error)) from None
    return adapter.dump_python(checked, mode="json", exclude_none=True)


def _metrics(counted: dict[str, float], given: Any) -> dict[str, float]:
    """What the environment gave, with what was counted for it. Raises TypeError or ValueError."""
    if not isinstance(given, Mapping | None):
        raise TypeError(f"metrics: expected numbers by name, got {describe_type(given)}")
    try:
        return METRICS.validate_python(counted | {name: _float(value) for name, value in (given or {}).items()})
    except ValidationError as error:
        raise ValueError(describe("metrics", error)) from None


def _float(value: Any) -> Any:
    """A number of any library as a float; anything else as it is."""
    try:
        return float(value) if hasattr(value, "__float__") else value
    except (TypeError, ValueError, ArithmeticError):
        return value


def _loaded(name: str) -> Callable[[], Any]:
    """Raises ConfigError if it can be neither an environment nor an agent."""
    create = load_hook(SETTING, name)
    lacking = [method for method in ("reset", "step") if inspect.isclass(create) and not hasattr(create, method)]
    if lacking and not _is_agent(create):
        raise ConfigError(f"{SETTING} {name!r}: the class has no method {' and no method '.join(lacking)}, and no play")
    try:
        inspect.signature(create).bind()
    except TypeError as error:
        raise ConfigError(f"{SETTING} {name!r}: must be created without arguments ({error})") from None
    return create


def _is_agent(create: Callable[[], Any]) -> bool:
    """An environment may have a method `play` of its own."""
    return inspect.isclass(create) and hasattr(create, "play") and not hasattr(create, "step")


def main(name: str, given: tuple[float, int, str]) -> None:
    limits, pipes = Limits(*given), Pipes()
    try:
        create = _loaded(name)
    except ConfigError as refusal:
        return pipes.send({"error": str(refusal)})
    limit_memory(limits.memory_mib)
    pipes.send({"is_agent": _is_agent(create)})
    stage, guard = Stage(create), Guard(limits, __file__)
    calls: dict[str, Callable[[Any], dict[str, Any]]]
    calls = {"reset": stage.reset, "step": stage.step, "play": stage.play, "close": stage.close}
    for call, argument, pieces in pipes.requests():
        answer = guard.call(partial(calls[call], argument), pieces)
        pipes.send(answer._asdict() if isinstance(answer, Failure) else answer)
    return None
