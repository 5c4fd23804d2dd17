"""Both formats carry the process's context; JSON lines are whole whatever the message holds."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from services import logs
from services.logs import MAX_ALIKE, LogFormat, configure


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


def test_nobody_fills_the_log(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    configure()
    for number in range(3 * MAX_ALIKE):
        logging.getLogger("asyncio").error("connection %d", number)
        logging.getLogger("services.example").info("step %d", number)
    lines = capsys.readouterr().err.splitlines()
    assert sum("step" in line for line in lines) == 3 * MAX_ALIKE
    assert sum("connection" in line for line in lines) == MAX_ALIKE
    assert sum("20 lines like this within 60 s" in line for line in lines) == 1
    monkeypatch.setattr(logs, "ALIKE_S", 0.0)
    logging.getLogger("asyncio").error("from elsewhere")
    assert "left out" not in capsys.readouterr().err


def test_a_log_says_how_much_it_left_out(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    configure()
    for number in range(MAX_ALIKE + 6):
        if number == MAX_ALIKE + 5:
            monkeypatch.setattr(logs, "ALIKE_S", 0.0)
            capsys.readouterr()
        logging.getLogger("asyncio").error("connection %d", number)
    told, line = capsys.readouterr().err.splitlines()
    assert "left out 5 lines like the next" in told
    assert f"connection {MAX_ALIKE + 5}" in line
