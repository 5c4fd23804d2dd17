"""Conversations as a model reads them, by its chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from dvp_rl.contract.errors import RequestError
from dvp_rl.contract.openai import ChatMessage, Tool

from .tokenizer import Tokenizer
from .tool_calls import ToolFormat, tool_format

MAX_BLAMED = 64
"""Most messages of which the one that a chat template refuses is searched for."""


class Chat:
    """Use it from one thread at a time, like its tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def format(self) -> ToolFormat | None:
        """How the model writes calls of tools; None if not as JSON objects."""
        ends = self._tokenizer.core.convert_ids_to_tokens(sorted(self._tokenizer.eos_ids))
        return tool_format(
            lambda messages, tools, prompt: self._tokenizer.render(messages, {}, tools, add_generation_prompt=prompt),
            ends,
        )

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[Tool], kwargs: Mapping[str, Any]) -> str:
        """The text of a conversation, up to the start of the assistant's turn. `kwargs`: further arguments of the chat
        template. Raises RequestError that names the message, if the template refuses one."""
        if tools and self.format is None:
            raise RequestError.at("tools", f"{len(tools)} tools", "null: this model's chat template calls none as JSON")
        given = [tool.model_dump(exclude_none=True) for tool in tools] or None
        said = [self._message(index, message) for index, message in enumerate(messages)]
        try:
            return self._tokenizer.render(said, kwargs, given)
        except RequestError as error:
            blamed = self._blamed(said, kwargs, given, str(error)) if len(said) <= MAX_BLAMED else None
            if blamed is None:
                raise
            raise RequestError.at(f"messages.{blamed}", f"role {said[blamed]['role']}", str(error)) from None

    def _blamed(
        self,
        messages: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None,
        reason: str,
    ) -> int | None:
        """Index of the first message with which the chat template refuses the conversation, for the same reason."""
        for end in range(1, len(messages) + 1):
            try:
                self._tokenizer.render(messages[:end], kwargs, tools)
            except RequestError as error:
                if str(error) == reason:
                    return end - 1
        return None

    def _message(self, index: int, message: ChatMessage) -> dict[str, Any]:
        """The message as chat templates read it."""
        role = "system" if message.role == "developer" else message.role
        given = message.model_dump(include={"name", "tool_call_id", "reasoning_content"}, exclude_none=True)
        turn = {"role": role, "content": message.text, **given}
        if message.tool_calls:
            if self.format is None:
                raise RequestError.at(
                    f"messages.{index}.tool_calls", f"{len(message.tool_calls)} calls", "null for this model"
                )
            turn["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": self._arguments(f"messages.{index}.tool_calls.{at}", call.function.arguments),
                    },
                }
                for at, call in enumerate(message.tool_calls)
            ]
        return turn

    def _arguments(self, field: str, arguments: str) -> Any:
        """Arguments as the chat template takes them: a text that it inserts unchanged, or an object."""
        try:
            parsed = json.loads(arguments)
            json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode()  # a lone surrogate is no text
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise RequestError.at(f"{field}.function.arguments", repr(arguments[:80]), "a JSON object, as text")
        return arguments if self.format and self.format.verbatim else parsed
