"""Logging, configured once per process: text by default, short on a terminal; JSON on request.

Every line carries the process's run, replica and weight version, as far as it has them; on a terminal, where there is
one process to watch, none does. Prompts are never logged.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TextIO

from dvp_rl.contract.errors import is_refusal

MAX_ALIKE = 20
ALIKE_S = 60.0
MAX_KEY_CHARS = 80
OURS = ("dvp_rl", "dvp_trainer", "deploy", "__main__")
FROM_OUTSIDE = ("asyncio", "uvicorn", "dvp_rl.http")
"""Loggers whose lines outsiders can trigger: asyncio, for example, reports every connection that it cannot accept. Of
their lines that begin alike, at most MAX_ALIKE are written per ALIKE_S seconds, and refusals by the operating system
are written without a traceback."""


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass
class LogContext:
    """Context of all log lines, shared with the formatter: assign `version` after a swap, and later lines show it."""

    run: str = ""
    replica: str = ""
    version: str = ""

    def known(self) -> dict[str, str]:
        return {name: value for name, value in asdict(self).items() if value}


class TextFormatter(logging.Formatter):
    def __init__(self, context: LogContext) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")
        self._context = context

    def format(self, record: logging.LogRecord) -> str:
        known = " ".join(f"{name}={value}" for name, value in self._context.known().items())
        return super().format(record) + (f"  [{known}]" if known else "")


class TerminalFormatter(logging.Formatter):
    """For somebody who watches the process: time and message, the level of what is more than information, and the
    logger if it is not ours."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        level = f"{record.levelname} " if record.levelno > logging.INFO else ""
        origin = "" if record.name.startswith(OURS) else f"{record.name}: "
        return f"{record.asctime} {level}{origin}{record.message}"


class JsonFormatter(logging.Formatter):
    def __init__(self, context: LogContext) -> None:
        super().__init__()
        self._context = context

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._context.known(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


@dataclass
class _Alike:
    """Counts of lines that begin alike."""

    begin: float
    num_written: int = 0
    num_left_out: int = 0


class LimitedHandler(logging.StreamHandler[TextIO]):
    """Limits the lines of FROM_OUTSIDE, so that nobody can fill the disk, and reports how many it left out. On a
    terminal, lines go where sys.stderr points now: a live progress bar stands in for it, and would erase others."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._alike: dict[str, _Alike] = {}
        self._on_terminal = stream is sys.stderr and stream.isatty()

    def emit(self, record: logging.LogRecord) -> None:
        if self._on_terminal:
            self.stream = sys.stderr
        if not record.name.startswith(FROM_OUTSIDE):
            super().emit(record)
            return
        self._report(ended_by=time.monotonic() - ALIKE_S)
        # asyncio puts all details into the message; its first line says what happened.
        begin = "".join(str(record.msg).splitlines()[:1])
        if record.exc_info and record.exc_info[1] and is_refusal(record.exc_info[1]):
            record.msg, record.args = f"{record.getMessage().splitlines()[0]}: {record.exc_info[1]}", ()
            record.exc_info = None
        line = f"{record.pathname}:{record.lineno} {begin[:MAX_KEY_CHARS]}"
        alike = self._alike.setdefault(line, _Alike(time.monotonic()))
        if alike.num_written == MAX_ALIKE:
            alike.num_left_out += 1
            return
        alike.num_written += 1
        super().emit(record)

    def close(self) -> None:
        self._report(ended_by=math.inf)
        super().close()

    def _report(self, ended_by: float) -> None:
        for line in [line for line, alike in self._alike.items() if alike.begin <= ended_by]:
            if left_out := self._alike.pop(line).num_left_out:
                message = f"left out {left_out} lines like {line!r}"
                super().emit(logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, (), None))


def configure(log_format: LogFormat = LogFormat.TEXT, log_level: LogLevel = LogLevel.INFO) -> LogContext:
    """Sends logs to stderr and returns their context. Third-party loggers are limited to warnings and errors."""
    context = LogContext()
    handler = LimitedHandler(sys.stderr)
    handler.setFormatter(_formatter(log_format, context))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in OURS:
        logging.getLogger(name).setLevel(log_level.upper())
    return context


def _formatter(log_format: LogFormat, context: LogContext) -> logging.Formatter:
    if log_format is LogFormat.JSON:
        return JsonFormatter(context)
    return TerminalFormatter() if sys.stderr.isatty() else TextFormatter(context)
