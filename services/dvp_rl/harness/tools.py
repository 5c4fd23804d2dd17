"""Python functions as tools of the model."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError, validate_call
from pydantic.errors import PydanticUserError

from dvp_rl.contract.errors import ConfigError
from dvp_rl.contract.openai import FunctionSpec, Tool
from dvp_rl.contract.record import describe
from dvp_rl.hooks import describe_error
from dvp_rl.workers.child import TimeLimitError, alarm


class Tools:
    """Functions with annotated arguments, plain or async. The model reads their names, docstrings and JSON schemas, and
    what they return: text as it is, anything else as JSON.

    A call that fails is an observation: the model reads the error. That includes a call of a tool that does not exist,
    arguments that do not fit, and a call that takes longer than `timeout_s` of dvp-harness. A hang in code that never
    returns to Python ends the process, and the episode.
    """

    def __init__(self, *functions: Callable[..., Any]) -> None:
        """Raises ConfigError if a function cannot be a tool, or two have the same name."""
        self._functions = {function.__name__: validate_call(function) for function in functions}
        if len(self._functions) < len(functions):
            names = ", ".join(function.__name__ for function in functions)
            raise ConfigError(f"tools {names}: two of them have the same name")
        self.definitions = [_definition(function) for function in functions]
        """In OpenAI's form."""

    async def run(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One message per call of an answer of the model, in order. Calls run one after the other."""
        return [
            {"role": "tool", "tool_call_id": call["id"], "content": await self._observe(**call["function"])}
            for call in message.get("tool_calls") or ()
        ]

    async def _observe(self, name: str, arguments: str) -> str:
        """What the model reads of a call."""
        if name not in self._functions:
            return f"error: there is no tool {name!r}, only {', '.join(self._functions)}"
        try:
            with alarm.apart():
                result = self._functions[name](**_object(arguments))
                if inspect.isawaitable(result):
                    async with asyncio.timeout(alarm.limit_s or None):
                        result = await result
                return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except ValidationError as error:
            return f"error: {describe(name, error)}"
        except (TimeLimitError, TimeoutError):
            return "error: this took too long"
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's function can raise anything
            return f"error: {describe_error(error)}"


def _object(arguments: str) -> dict[str, Any]:
    """Raises ValueError if the text is no JSON object."""
    try:
        found = json.loads(arguments)
    except ValueError as error:
        raise ValueError(f"the arguments are no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"the arguments must be a JSON object, got {arguments:.100}")
    return found


def _definition(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        schema = TypeAdapter[Any](cast(Any, function)).json_schema()
        schema.pop("additionalProperties", None)
        for argument in schema.get("properties", {}).values():
            argument.pop("title", None)  # its name once more
        spec = FunctionSpec(name=function.__name__, description=inspect.getdoc(function), parameters=schema)
    except (PydanticUserError, ValidationError) as error:
        raise ConfigError(f"tool {function.__name__}: {describe_error(error)}") from None
    return Tool(type="function", function=spec).model_dump(exclude_none=True)
