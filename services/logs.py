"""Logging, configured once per process: text for people, JSON by switch.

Every line carries what identifies the process: run, replica, weight version. Prompts never enter a log.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TextIO

MAX_ALIKE = 20
ALIKE_S = 60.0
"""So many warnings and errors from one place in the code in this time; more are counted. Others must not be able to
fill a disk: asyncio alone wrote 400 MB a minute about connections that it could not accept."""


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
    """Shared with the formatter: assign `version` after a swap and every later line shows it."""

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
    """Lines from one place in the code."""

    begin: float
    num_written: int = 0
    num_left_out: int = 0


class LimitedHandler(logging.StreamHandler[TextIO]):
    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._by_place: dict[tuple[str, int], _Alike] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING:
            super().emit(record)
            return
        place, now = (record.pathname, record.lineno), time.monotonic()
        alike = self._by_place.setdefault(place, _Alike(now))
        if now - alike.begin >= ALIKE_S:
            if alike.num_left_out:
                self._tell(record, f"left out {alike.num_left_out} lines like the next")
            alike = self._by_place[place] = _Alike(now)
        if alike.num_written == MAX_ALIKE:
            alike.num_left_out += 1
            return
        alike.num_written += 1
        super().emit(record)
        if alike.num_written == MAX_ALIKE:
            self._tell(record, f"{MAX_ALIKE} lines like this within {ALIKE_S:g} s: leaving out more")

    def _tell(self, about: logging.LogRecord, message: str) -> None:
        super().emit(logging.LogRecord(about.name, about.levelno, about.pathname, about.lineno, message, (), None))


def configure(log_format: LogFormat = LogFormat.TEXT, log_level: LogLevel = LogLevel.INFO) -> LogContext:
    """Logs to stderr from here on. Other people's loggers are kept at warning."""
    context = LogContext()
    formatter = JsonFormatter(context) if log_format is LogFormat.JSON else TextFormatter(context)
    handler = LimitedHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in ("services", "trainer", "deploy", "__main__"):
        logging.getLogger(name).setLevel(log_level.upper())
    return context
