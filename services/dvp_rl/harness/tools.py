"""Python functions as tools of the model."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

from pydantic import TypeAdapter, ValidationError, validate_call
from pydantic.errors import PydanticUserError
from pydantic_core import to_jsonable_python

from dvp_rl.contract.errors import ConfigError
from dvp_rl.contract.openai import FunctionSpec, Tool
from dvp_rl.contract.record import describe
from dvp_rl.hooks import describe_error, readable
from dvp_rl.workers.child import TimeLimitError, alarm


class Tools:
    """Functions with annotated arguments, plain or async. The model reads their names, docstrings and JSON schemas, and
    what they return: text as it is, anything else as JSON.

    A call that fails is an observation: the model reads the error. That includes a call of a tool that does not exist,
    arguments that do not fit, and a call that takes longer than `timeout_s` of dvp-harness. A hang in code that never
    returns to Python ends the process, and the episode.
    """

    num_errors: ClassVar[int] = 0
    """Number of calls that failed in this process, of all objects."""

    def __init__(self, *functions: Callable[..., Any]) -> None:
        """Raises ConfigError if a function cannot be a tool, or two have the same name."""
        tools = [_tool(function) for function in functions]
        self.definitions = [definition for _, definition in tools]
        """In OpenAI's form."""
        self._functions = {definition["function"]["name"]: function for function, definition in tools}
        if len(self._functions) < len(functions):
            names = ", ".join(function.__name__ for function in functions)
            raise ConfigError(f"tools {names}: two of them have the same name")

    async def run(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One message per call of an answer of the model, in order. Calls run one after the other."""
        return [
            {"role": "tool", "tool_call_id": call["id"], "content": await self._observe(**call["function"])}
            for call in message.get("tool_calls") or ()
        ]

    async def _observe(self, name: str, arguments: str) -> str:
        """What the model reads of a call."""
        if name not in self._functions:
            return self._error(f"there is no tool {name!r}, only {', '.join(self._functions)}")
        try:
            with alarm.apart():
                result = self._functions[name](**_object(arguments))
                if inspect.isawaitable(result):
                    async with asyncio.timeout(alarm.limit_s or None):
                        result = await result
                if not isinstance(result, str):
                    result = json.dumps(to_jsonable_python(result, fallback=str), ensure_ascii=False)
                return readable(result)
        except ValidationError as error:
            return self._error(describe(name, error))
        except (TimeLimitError, TimeoutError):
            return self._error("this took too long")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's function can raise anything
            return self._error(describe_error(error))

    def _error(self, reason: str) -> str:
        Tools.num_errors += 1
        return f"error: {reason}"


def _object(arguments: str) -> dict[str, Any]:
    """Raises ValueError if the text is no JSON object."""
    try:
        found = json.loads(arguments)
    except ValueError as error:
        raise ValueError(f"the arguments are no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"the arguments must be a JSON object, got {arguments:.100}")
    return found


def _tool(function: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function with its arguments checked, and its definition. Raises ConfigError."""
    if not inspect.isroutine(function):
        raise ConfigError(f"tool {function!r:.100}: not a function or a method")
    try:
        checked = validate_call(function)
        schema = TypeAdapter[Any](cast(Any, function)).json_schema()
        if schema.get("additionalProperties") is False:
            del schema["additionalProperties"]
        for argument in schema.get("properties", {}).values():
            argument.pop("title", None)  # its name once more
        spec = FunctionSpec(name=function.__name__, description=inspect.getdoc(function), parameters=schema)
    except ValidationError as error:
        raise ConfigError(describe(f"tool {function.__name__}", error)) from None
    except (PydanticUserError, NameError) as error:
        raise ConfigError(f"tool {function.__name__}: {describe_error(error)}") from None
    return checked, Tool(type="function", function=spec).model_dump(exclude_none=True)
