"""Ends a process with the one that started it, however that ends (Linux only): `python -I -S tether.py PID COMMAND...`
becomes COMMAND, which gets SIGTERM when the parent PID is gone."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1


def tethered(command: Sequence[str | os.PathLike[str]]) -> list[str]:
    """The command line that runs `command` so that it ends with the calling thread."""
    plain = [os.fspath(word) for word in command]
    if sys.platform != "linux":
        return plain
    return [sys.executable, "-I", "-S", str(Path(__file__)), str(os.getpid()), *plain]


def end_with_parent(number: signal.Signals) -> None:
    """Makes the kernel send this process the signal when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


if __name__ == "__main__":
    end_with_parent(signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)  # the parent ended before prctl took effect
    os.execvp(sys.argv[2], sys.argv[2:])
