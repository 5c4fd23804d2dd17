"""The two forms in which a reward may be written, each as a plain function or a coroutine (async def).

    own:  reward(completion, answer, *, prompt, extra) -> float          one call per completion
    TRL:  reward(completions, prompts, ..., **kwargs) -> list[float]     one call per group

A function with a parameter `completions`, `prompts` or `completion_ids` is called as TRL's GRPOTrainer calls it: with
one list entry per completion of a group, chats as lists of messages, and every column of the row as a keyword. A reward
of None counts as 0, as it does in TRL. Of TRL's keywords, `trainer_state`, `log_extra` and `log_metric` are not passed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any, TypedDict

from dvp_rl.contract.errors import ConfigError
from dvp_rl.workers.child import Loop

TRL_PARAMETERS = {"completions", "prompts", "completion_ids"}
EXPECTED = "(completion, answer, *, prompt, extra) or, as in TRL, (completions, **kwargs)"


class Form(StrEnum):
    OWN = "own"
    TRL = "trl"


class Request(TypedDict):
    """Completions of one row, as JSON values. The own form takes one completion per request."""

    completions: list[str]
    completion_ids: list[list[int]]
    """Token ids; empty for the own form."""
    prompt: str
    messages: list[dict[str, str]] | None
    """The prompt as chat messages; None if it is plain text."""
    answer: str | None
    columns: dict[str, Any]
    answer_column: str | None


def form_of(name: str, function: Callable[..., Any]) -> Form:
    """Raises ConfigError if the function can be called in neither form."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function without a Python signature
        return Form.OWN
    if TRL_PARAMETERS & set(signature.parameters):
        return Form.TRL
    try:
        signature.bind("", None, prompt="", extra={})
    except TypeError as error:
        with suppress(TypeError):
            signature.bind(**dict.fromkeys(TRL_PARAMETERS, ()))
            return Form.TRL
        raise ConfigError(f"reward.name {name!r} takes {signature}, expected {EXPECTED} ({error})") from None
    return Form.OWN


class RewardFunction:
    """Calls a reward in its form. `close` it in the end."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.form, self._function = form_of(name, function), function
        self._loop = Loop()

    def __call__(self, request: Request) -> Sequence[Any]:
        """One value of any type per completion. Raises TypeError or ValueError if there are not as many, and whatever
        the function raises."""
        if self.form is Form.OWN:
            extra = {name: value for name, value in request["columns"].items() if name != request["answer_column"]}
            (completion,) = request["completions"]
            return [
                self._loop.finished(
                    self._function(completion, request["answer"], prompt=request["prompt"], extra=extra)
                )
            ]
        values = list(self._loop.finished(self._function(**_trl_arguments(request))))
        if len(values) != len(request["completions"]):
            raise ValueError(f"returned {len(values)} rewards for {len(request['completions'])} completions")
        return [0.0 if value is None else value for value in values]

    def close(self) -> None:
        self._loop.close()


def _trl_arguments(request: Request) -> dict[str, Any]:
    n, messages = len(request["completions"]), request["messages"]
    chat = [[{"role": "assistant", "content": completion}] for completion in request["completions"]]
    columns = {"answer": request["answer"]} | request["columns"]
    return {name: [value] * n for name, value in columns.items()} | {
        "prompts": [request["prompt"] if messages is None else messages] * n,
        "completions": request["completions"] if messages is None else chat,
        "completion_ids": request["completion_ids"],
    }
