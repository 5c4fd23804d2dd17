"""The forms of what plays an episode: an environment, or an agent."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

Message = Mapping[str, Any]
"""A message in OpenAI's form: role, content and so on."""


class Step(NamedTuple):
    """What an environment says to an answer of the model. A plain tuple (messages, reward, done) will do, too."""

    messages: Sequence[Message] = ()
    """What the model reads next, after its own answer: of tools, or of the user."""
    reward: float | None = None
    """What the answer earned. The rewards of an episode are summed; if all are None, the trainer's reward function
    scores it."""
    done: bool = False
    """Whether the episode has ended."""
    metrics: Mapping[str, float] = {}
    """What else is counted: numbers by name, which are summed over the episode. The trainer reports their means."""


class Environment(Protocol):
    """One object plays one episode. Both methods may be plain or async. Two more attributes are optional: `tools`, a
    Tools or a list of tools in OpenAI's form, read after `reset`; and a method `close`, called after the last step."""

    def reset(self, row: dict[str, Any], /) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """The first messages. `row`: number (row), prompt (text or messages), answer and other columns of the data."""

    def step(self, message: dict[str, Any], /) -> Step | Awaitable[Step]:
        """`message`: what the model said, with role, content and, if it called tools, tool_calls."""


class Endpoint(NamedTuple):
    """Where an agent finds the model. What it draws there is recorded, token for token."""

    base_url: str
    """That of OpenAI's API, which OpenAI's client takes."""
    api_key: str
    model: str
    """The model's name."""

    def __repr__(self) -> str:
        """Keeps the key out of errors, which are stored and logged."""
        return f"Endpoint({self.base_url!r}, api_key=..., model={self.model!r})"


class Agent(Protocol):
    """A class, with no method `step`, whose objects play one episode each, with any client of OpenAI's API. `play` may
    be plain or async."""

    def play(self, row: dict[str, Any], endpoint: Endpoint, /) -> Step | float | Awaitable[Step | float | None] | None:
        """The episode's reward, None if the trainer's reward function gives it, or a Step with more: one that is not
        `done` was cut off. `row`: as an environment gets it."""
