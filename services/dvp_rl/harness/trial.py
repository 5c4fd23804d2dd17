"""`dvp-harness --trial`: what an environment says, before there is a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import JsonValue, TypeAdapter, ValidationError

from dvp_rl.client import calls
from dvp_rl.contract.errors import ConfigError
from dvp_rl.contract.record import describe
from dvp_rl.workers.limits import Limits

from .process import EnvironmentFailedError, EnvironmentProcess
from .settings import HarnessSettings

ROW = TypeAdapter(dict[str, JsonValue])


class Said(NamedTuple):
    """What an environment says of one row, as JSON."""

    request: dict[str, Any] | None
    """The first turn, as a replica gets it: messages and tools. None: an agent asks the model itself."""
    answer: str = ""
    """What is said to it: the row's answer, or nothing."""
    step: Mapping[str, Any] = {}
    """What it says to that: a Step."""


def read_row(file: Path) -> dict[str, JsonValue]:
    """Raises ConfigError."""
    try:
        return ROW.validate_json(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"trial: {file} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise ConfigError(f"trial: {file}: {describe('row', error)}") from None


async def play(settings: HarnessSettings, row: dict[str, Any]) -> Said:
    """Raises ConfigError, with the traceback if there is one, if the environment fails, and RequestError if no replica
    would take its messages."""
    environment = EnvironmentProcess(settings.environment, Limits(settings.timeout_s, settings.memory_mib))
    try:
        await environment.start()
        if environment.is_agent:
            return Said(None)
        messages, tools = await environment.reset(row)
        turn = calls.chat("trial", {"model": "trial", "messages": messages, "tools": tools or None}, key="")
        assert turn.body is not None
        answer = str(row.get("answer") or "")
        step = await environment.step({"role": "assistant", "content": answer})
        await environment.close()
    except EnvironmentFailedError as error:
        raise ConfigError(f"environment {settings.environment!r}: {error}\n{error.trace}".rstrip()) from None
    finally:
        await environment.stop()
    return Said(turn.body.model_dump(mode="json", exclude_none=True), answer, step._asdict())
