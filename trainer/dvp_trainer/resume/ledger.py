"""Append-only files of job ids: which were submitted, and how each one ended.

A checkpoint records each ledger's length, and a resumed run truncates the file to it. The files therefore always match
the checkpoint's timeline. They grow without bound, but only on disk.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dvp_rl.contract.errors import ConfigError
from dvp_trainer.disk import AppendedFile

SUBMITTED, CONSUMED = "submitted.jsonl", "consumed.jsonl"


class Ledger:
    """A ledger file with one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = AppendedFile(path)

    @property
    def length(self) -> int:
        """Bytes written so far."""
        return self._file.length

    def append(self, entries: Iterable[dict[str, Any]]) -> None:
        self._file.append(b"".join(json.dumps(entry).encode() + b"\n" for entry in entries))

    def sync(self) -> None:
        self._file.sync()

    def cut(self, length: int) -> None:
        """Truncates the file to its first `length` bytes. Raises ConfigError if it is shorter."""
        if self.length < length:
            raise ConfigError(
                f"{self.path}: {self.length} bytes, the checkpoint needs {length}; the file was truncated or replaced. "
                "Restore it, or start a new run"
            )
        with self.path.open("rb") as old:
            kept = old.read(length)
        self._file.replace([kept])

    def close(self) -> None:
        self._file.close()


def read_ledger(path: Path) -> Iterator[dict[str, Any]]:
    """The entries of all complete lines; an incomplete last line, left by a crash, is skipped."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)
