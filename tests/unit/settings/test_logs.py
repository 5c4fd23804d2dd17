"""Both formats carry the process's context; JSON lines are whole whatever the message holds."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from services.logs import LogFormat, configure


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_json_lines_carry_the_context_as_it_is_now(capsys: pytest.CaptureFixture[str]) -> None:
    context = configure(LogFormat.JSON)
    context.run, context.version = "r", "r:1:aa"
    logging.getLogger("services.example").info("two\nlines of %s", "text")
    context.version = "r:2:bb"
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("services.example").exception("failed")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["message"], first["level"], first["version"]) == ("two\nlines of text", "info", "r:1:aa")
    assert "replica" not in first
    assert second["version"] == "r:2:bb"
    assert "ValueError: why" in second["traceback"]


def test_text_is_for_people_and_foreign_loggers_are_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    context = configure()
    context.replica = "a"
    logging.getLogger("services.example").info("hello")
    logging.getLogger("somebody.else").info("noise")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "hello" in lines[0]
    assert "replica=a" in lines[0]
