"""A file to which the trainer appends lines, or which it replaces when it resumes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

MAX_READ = 1 << 22
"""Most bytes per look, so that a long run's file does not delay the page; but at least a line."""


class Grown(NamedTuple):
    """What is new."""

    lines: Sequence[bytes] = ()
    """Without their ends."""
    offset: int = 0
    """Where the first of them begins, in bytes."""
    anew: bool = True
    """Whether the file was replaced, so that lines seen before no longer count."""
    error: str = ""
    """Why the file cannot be read; empty if it can."""


class GrowingFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode = self._offset = 0

    def look(self) -> Grown | None:
        """What has come since the last look; None if nothing has. An error, or an empty file, is new once."""
        try:
            with self.path.open("rb") as file:
                opened = os.fstat(file.fileno())
                inode, size = opened.st_ino, opened.st_size
                anew = inode != self._inode or size < self._offset
                offset = 0 if anew else self._offset
                file.seek(offset)
                # A last line without an end is still being written.
                lines = (file.read(MAX_READ) + file.readline()).split(b"\n")[:-1]
        except OSError as error:
            known, self._inode = self._inode == -1, -1
            return None if known else Grown(error=f"{self.path}: {error.strerror}")
        if not lines and not anew:
            return None
        self._inode, self._offset = inode, offset + sum(len(line) + 1 for line in lines)
        return Grown(lines, offset, anew)
