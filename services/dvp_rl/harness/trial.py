"""`dvp-harness --trial`: what an environment says, before there is a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from dvp_rl.client import calls
from dvp_rl.contract.errors import ConfigError
from dvp_rl.contract.record import describe
from dvp_rl.workers.limits import Limits

from .process import EnvironmentFailedError, EnvironmentProcess
from .settings import HarnessSettings


class Row(BaseModel):
    """A row of a data set, as an environment gets it."""

    model_config = ConfigDict(extra="forbid")

    row: int = 0
    prompt: str | list[dict[str, JsonValue]]
    answer: str | None = None
    columns: dict[str, JsonValue] = {}


class Said(NamedTuple):
    """What an environment says of one row, as JSON."""

    requests: list[dict[str, Any]]
    """The first turn, as a replica gets it (messages and tools), and the second one, if the episode goes on. Of an
    agent none: it asks the model itself."""
    answer: str = ""
    """What is said to the first one: the row's answer, or nothing."""
    step: Mapping[str, Any] = {}
    """What the environment says to that: a Step."""
    close_error: str = ""
    """Why the episode's end failed, which costs nothing."""


def read_row(file: Path) -> Row:
    """Raises ConfigError."""
    try:
        return Row.model_validate_json(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"trial: {file} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise ConfigError(f"trial: {file}: {describe('row', error)}") from None


async def play_row(settings: HarnessSettings, row: Row) -> Said:
    """Raises ConfigError, with the traceback if there is one, if the environment fails, and RequestError if no replica
    would take its messages."""
    environment = EnvironmentProcess(settings.environment, Limits(settings.timeout_s, settings.memory_mib))
    try:
        await environment.start()
        if environment.is_agent:
            return Said([])
        messages, tools = await environment.reset(row.model_dump(mode="json"))
        answer = {"role": "assistant", "content": row.answer or ""}
        requests = [_turn(messages, tools)]
        step = await environment.step(answer)
        if not step.done:
            requests.append(_turn([*messages, answer, *step.messages], tools))
        return Said(requests, answer["content"], step._asdict(), await _closed(environment))
    except EnvironmentFailedError as error:
        raise ConfigError(f"environment {settings.environment!r}: {error}\n{error.trace}".rstrip()) from None
    finally:
        await environment.stop()


def _turn(messages: list[Any], tools: list[Any]) -> dict[str, Any]:
    """A turn as a replica gets it. Raises RequestError."""
    turn = calls.chat("trial", {"model": "trial", "messages": messages, "tools": tools or None}, key="")
    assert turn.body is not None
    return turn.body.model_dump(mode="json", exclude_none=True)


async def _closed(environment: EnvironmentProcess) -> str:
    """Why that failed; nothing if it did not."""
    try:
        await environment.close()
    except EnvironmentFailedError as error:
        return str(error)
    return ""
