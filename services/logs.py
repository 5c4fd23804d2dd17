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


def configure(log_format: LogFormat = LogFormat.TEXT, log_level: LogLevel = LogLevel.INFO) -> LogContext:
    """Logs to stderr from here on. Other people's loggers are kept at warning."""
    context = LogContext()
    formatter = JsonFormatter(context) if log_format is LogFormat.JSON else TextFormatter(context)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in ("services", "trainer", "deploy", "__main__"):
        logging.getLogger(name).setLevel(log_level.upper())
    return context
