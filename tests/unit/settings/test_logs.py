"""Both formats carry the process's context; a JSON record is one line whatever its message holds."""

from __future__ import annotations

import errno
import io
import json
import logging
import re
import sys
from collections.abc import Iterator

import pytest

from dvp_rl import logs
from dvp_rl.logs import MAX_ALIKE, LogFormat, configure


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
    logging.getLogger("dvp_rl.example").info("two\nlines of %s", "text")
    context.version = "r:2:bb"
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("dvp_rl.example").exception("failed")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["message"], first["level"], first["version"]) == ("two\nlines of text", "info", "r:1:aa")
    assert "replica" not in first
    assert second["version"] == "r:2:bb"
    assert "ValueError: why" in second["traceback"]


def test_text_is_for_people_and_foreign_loggers_are_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    context = configure()
    context.replica = "a"
    logging.getLogger("dvp_rl.example").info("hello")
    logging.getLogger("somebody.else").info("noise")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "hello" in lines[0]
    assert "replica=a" in lines[0]


def test_lines_are_short_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    configure().run = "mine"
    logging.getLogger("dvp_rl.example").info("hello")
    logging.getLogger("somebody.else").warning("careful")
    hello, careful = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d hello", hello)
    assert re.fullmatch(r"\d\d:\d\d:\d\d WARNING somebody\.else: careful", careful)


def test_strangers_do_not_fill_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    configure()
    for number in range(3 * MAX_ALIKE):
        logging.getLogger("asyncio").error(f"socket.accept() out of system resource\nsocket: {number}")  # as it does
        logging.getLogger("uvicorn.error").warning("Invalid request %d", number)
        logging.getLogger("dvp_rl.example").warning("job %d is dead", number)
    logging.getLogger("asyncio").error("Task exception was never retrieved\nfuture: a")
    written = capsys.readouterr().err
    assert written.count("out of system resource") == written.count("Invalid request") == MAX_ALIKE
    assert written.count("is dead") == 3 * MAX_ALIKE
    assert written.count("Task exception was never retrieved") == 1


def test_what_the_system_refuses_strangers_takes_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure()
    for error in (OSError(errno.EMFILE, "Too many open files"), RuntimeError("a mistake")):
        logging.getLogger("asyncio").error("socket.%s() failed\nsocket: 1", "accept", exc_info=error)
    refused, *mistake = capsys.readouterr().err.splitlines()
    assert refused.endswith("socket.accept() failed: [Errno 24] Too many open files")
    assert mistake[-1] == "RuntimeError: a mistake"


@pytest.mark.parametrize("how", ["later", "at the end"])
def test_a_log_says_how_much_it_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    configure()
    for number in range(MAX_ALIKE + 5):
        logging.getLogger("asyncio").error("connection %d", number)
    capsys.readouterr()
    if how == "later":
        monkeypatch.setattr(logs, "ALIKE_S", 0.0)
        logging.getLogger("uvicorn.error").error("something else")
    else:
        logging.getLogger().handlers[0].close()
    told = capsys.readouterr().err.splitlines()[0]
    assert "left out 5 lines like" in told
    assert "test_logs.py" in told
    assert "connection %d" in told


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "moves"), [(Screen, True), (io.StringIO, False)])
def test_on_a_terminal_lines_go_above_a_live_bar(
    stream: type[io.StringIO], moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rich puts a stream of its own in the place of sys.stderr while it shows a bar."""
    first, bar = stream(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    configure()
    monkeypatch.setattr(sys, "stderr", bar)
    logging.getLogger("dvp_rl").warning("a replica died")
    assert ["a replica died" in place.getvalue() for place in (first, bar)] == [not moves, moves]
