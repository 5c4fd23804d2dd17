"""Append-only files of job ids: what was submitted, and how each id ended.

A checkpoint records each ledger's length; a resumed run cuts the file there. So the files always tell the story of the
timeline that the checkpoint belongs to, and grow without bound only on disk.
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
    """One JSON object per line."""

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
        """Forgets everything after the first `length` bytes."""
        if self.length < length:
            raise ConfigError(
                f"{self.path}: {self.length} bytes, the checkpoint counts on {length}; the file was cut or replaced. "
                "Restore it, or start a new run"
            )
        with self.path.open("rb") as old:
            kept = old.read(length)
        self._file.replace(kept)

    def close(self) -> None:
        self._file.close()


def read_ledger(path: Path) -> Iterator[dict[str, Any]]:
    """Every complete line; a last line that a crash cut short is skipped."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)
