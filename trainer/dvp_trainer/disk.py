"""Writes to a disk that may be full.

A failed write ends the run with a message; the run can be resumed from the newest checkpoint.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from dvp_rl.contract.errors import ConfigError

NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR}
"""Errors that freeing disk space does not fix."""
NO_FILES = {errno.EMFILE, errno.ENFILE}


def unwritable(what: str, folder: Path, error: Exception) -> str:
    """Message with the failure, the place and the remedy. `what` begins with the setting that names the folder."""
    if isinstance(error, OSError) and error.errno in NOT_ALLOWED:
        return f"{what} could not be written by user {os.geteuid()} ({error}). Name a folder that it can write to"
    if isinstance(error, OSError) and error.errno in NO_FILES:
        return f"{what} could not be written ({error}). Raise the limit of open files (ulimit -n)"
    # The folder itself may be what could not be created.
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free_mib = shutil.disk_usage(there).free / 2**20
    return (
        f"{what} could not be written ({error}); {free_mib:.0f} MiB free in {there}. Make room, then start the same "
        "command again to resume from the newest checkpoint"
    )


@contextmanager
def writing(what: str, folder: Path) -> Iterator[None]:
    """Wraps code that writes to `folder`: raises ConfigError for OSError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(unwritable(what, folder, error)) from error


def write_private(path: Path, text: str) -> None:
    """Writes a file in out_dir that only its owner can read. Raises ConfigError as `writing` does."""
    with writing(f"out_dir: {path}", path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # whatever its permissions were
        with open(path, "x", encoding="utf-8", errors="backslashreplace", opener=owner_only) as file:
            file.write(text)


def owner_only(path: str, flags: int) -> int:
    """An opener that creates files which only their owner can read."""
    return os.open(path, flags, 0o600)


class AppendedFile:
    """A growing file in out_dir. Writes are unbuffered: an append either reaches the file or raises ConfigError."""

    def __init__(self, path: Path, *, private: bool = False) -> None:
        """`private`: once it is replaced, only its owner can read it."""
        self.path, self._private = path, private
        with self._writing():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)

    @property
    def length(self) -> int:
        return self._file.tell()

    def append(self, data: bytes) -> None:
        with self._writing():
            while data:
                data = data[self._file.write(data) :]

    def sync(self) -> None:
        with self._writing():
            os.fsync(self._file.fileno())

    def replace(self, parts: Iterable[bytes]) -> None:
        """Replaces the content by renaming a new file into place: a replaced trainer that wakes up keeps writing to the
        old file."""
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        with self._writing():
            try:
                with open(beside, "wb", opener=owner_only if self._private else None) as new:
                    new.writelines(parts)
                    new.flush()
                    os.fsync(new.fileno())
                beside.rename(self.path)
            finally:
                beside.unlink(missing_ok=True)
            self._file.close()
            self._file = self.path.open("ab", buffering=0)

    def close(self) -> None:
        self._file.close()

    def _writing(self) -> AbstractContextManager[None]:
        return writing(f"out_dir: {self.path}", self.path.parent)
