"""Functions as tools: what the model reads of them, and of calls that fail."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from functools import partial
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from dvp_rl.contract.errors import ConfigError
from dvp_rl.harness import Tools


def add(a: float, b: Annotated[float, Field(description="The second number.")] = 2) -> float:
    """Adds two numbers."""
    return a + b


async def look(where: Literal["left", "right"]) -> dict[str, str]:
    await asyncio.sleep(0)
    return {"where": where, "seen": "é"}


def fail() -> str:
    raise ZeroDivisionError("on purpose")


def leave() -> str:
    raise SystemExit(3)


class Colour(Enum):
    RED = "red"


@dataclass
class Spot:
    colour: Colour
    at: datetime


def paint() -> Spot:
    return Spot(Colour.RED, datetime(2026, 1, 2))


def echo(text: str) -> str:
    return text


def called(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


def test_what_the_model_reads_of_a_function() -> None:
    first, second = Tools(add, look).definitions
    assert first == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "number"},
                    "b": {"type": "number", "default": 2, "description": "The second number."},
                },
                "required": ["a"],
            },
        },
    }
    assert second["function"]["parameters"]["properties"] == {"where": {"type": "string", "enum": ["left", "right"]}}
    assert "description" not in second["function"]


@pytest.mark.parametrize(
    ("name", "arguments", "observation"),
    [
        ("add", '{"a": 1}', "3.0"),
        ("add", '{"a": "1", "b": 4}', "5.0"),
        ("look", '{"where": "left"}', '{"where": "left", "seen": "é"}'),
        ("add", "{}", "error: add: a: Missing required argument"),
        ("add", '{"a": "one"}', "error: add: a: Input should be a valid number"),
        ("add", '{"a": 1, "c": 1}', "error: add: c: Unexpected keyword argument"),
        ("add", "a=1", "error: ValueError: the arguments are no JSON"),
        ("add", "[1]", "error: ValueError: the arguments must be a JSON object, got [1]"),
        ("fail", "{}", "error: ZeroDivisionError: on purpose"),
        ("leave", "{}", "error: SystemExit: 3"),
        ("subtract", "{}", "error: there is no tool 'subtract', only add, look, fail, leave, paint, echo"),
        ("paint", "{}", '{"colour": "red", "at": "2026-01-02T00:00:00"}'),
        ("echo", r'{"text": "\ud800"}', r"\ud800"),
    ],
)
async def test_what_the_model_reads_of_a_call(name: str, arguments: str, observation: str) -> None:
    (message,) = await Tools(add, look, fail, leave, paint, echo).run(called(name, arguments))
    assert (message["role"], message["tool_call_id"]) == ("tool", "c1")
    assert message["content"].startswith(observation)
    assert "\n" not in message["content"]


async def test_an_answer_without_calls_has_no_observations() -> None:
    assert await Tools(add).run({"role": "assistant", "content": "3"}) == []


def test_methods_are_tools() -> None:
    class Shelf:
        def put(self, book: str) -> str:
            return book

    (tool,) = Tools(Shelf().put).definitions
    assert list(tool["function"]["parameters"]["properties"]) == ["book"]


def test_what_cannot_be_a_tool_is_refused() -> None:
    def anything(*args: int, **kwargs: int) -> None: ...

    def callback(then: Any, /) -> None: ...

    def nowhere(a: "Nowhere") -> None: ...  # type: ignore[name-defined]  # noqa: F821, UP037

    for function in (anything, callback, nowhere, len):
        with pytest.raises(ConfigError, match=f"tool {function.__name__}: "):
            Tools(function)
    for other in (partial(add, 1), [add], Colour):
        with pytest.raises(ConfigError, match="not a function or a method"):
            Tools(other)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tool <lambda>: name: String should match pattern"):
        Tools(lambda: None)
    with pytest.raises(ConfigError, match="tools add, add: two of them have the same name"):
        Tools(add, add)
