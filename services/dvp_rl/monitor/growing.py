"""A file to which the trainer appends lines, or which it replaces when it resumes."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

MAX_READ = 1 << 22
"""Most bytes per look; but at least a line."""
TAIL = 256
"""Last bytes read that must still be where they were: otherwise the file was overwritten."""


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
        self._forget()

    def _forget(self, error: str = "") -> None:
        self._inode, self._offset, self._tail, self._error = -1, 0, b"", error

    def look(self) -> Grown | None:
        """What has come since the last look; None if nothing has. An error, or an empty file, is new once."""
        try:
            with self.open() as file:
                inode = os.fstat(file.fileno()).st_ino
                file.seek(self._offset - len(self._tail))
                if anew := inode != self._inode or file.read(len(self._tail)) != self._tail:
                    self._forget()
                    file.seek(0)
                text = file.read(MAX_READ) + file.readline()
        except OSError as error:
            why = f"{self.path}: {error.strerror}"
            if why == self._error:
                return None
            self._forget(why)
            return Grown(error=why)
        whole = text[: text.rfind(b"\n") + 1]  # a last line without an end is still being written
        if not whole and not anew:
            return None
        grown = Grown(whole.split(b"\n")[:-1], self._offset, anew)
        self._inode, self._offset, self._tail = inode, self._offset + len(whole), (self._tail + whole)[-TAIL:]
        return grown

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Raises OSError, also for what is no file: a pipe would never end."""
        with open(self.path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            yield file
