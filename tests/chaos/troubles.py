"""Non-lethal harm: troubles of the machine, a volume or the network that processes have to survive."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Self

from dvp_rl.ports import HOST

CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2
CAPABILITY_VERSION_3 = 0x20080522
SIZES = (1 << 20, 1 << 12)
"""Sizes in bytes of the writes that fill a disk: large ones until one is refused, then small ones."""


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Sets(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]


def obey_modes() -> None:
    """Makes this process obey file modes, even as root. Source: capset(2)."""
    libc, header, sets = ctypes.CDLL(None, use_errno=True), _Header(CAPABILITY_VERSION_3, 0), (_Sets * 2)()
    if libc.capget(ctypes.byref(header), sets):
        raise OSError(ctypes.get_errno(), "capget")
    sets[0].effective &= ~(1 << CAP_DAC_OVERRIDE | 1 << CAP_DAC_READ_SEARCH)
    sets[0].permitted &= sets[0].effective
    if libc.capset(ctypes.byref(header), sets):
        raise OSError(ctypes.get_errno(), "capset")


class Disk:
    """A folder with its own file system, so that it can be filled. Only root may mount one: for other users it is an
    ordinary folder, and `fillable` is False."""

    def __init__(self, folder: Path, mib: int) -> None:
        self.folder, self._mib, self.fillable = folder, mib, False

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={self._mib}m", "tmpfs", self.folder]
        self.fillable = os.geteuid() == 0 and subprocess.run(mount, check=False).returncode == 0
        return self

    def __exit__(self, *_: object) -> None:
        """Unmounts the file system; its files stay in the folder."""
        if self.fillable:
            copy = self.folder.with_name(f".{self.folder.name}")
            shutil.copytree(self.folder, copy)
            subprocess.run(["umount", "--lazy", self.folder], check=True)
            self.folder.rmdir()
            copy.rename(self.folder)

    @contextmanager
    def full(self) -> Iterator[None]:
        """Leaves not a byte free during the block."""
        ballast = self.folder / "ballast"
        try:
            with ballast.open("wb", buffering=0) as file:
                for size in SIZES:
                    with suppress(OSError):
                        while True:
                            file.write(bytes(size))
            yield
        finally:
            ballast.unlink()


@contextmanager
def no_files(pid: int) -> Iterator[None]:
    """Keeps the process from opening another file or socket."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    opened = set(os.listdir(f"/proc/{pid}/fd"))
    lowest_free = next(number for number in count() if str(number) not in opened)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def denied(folder: Path) -> Iterator[None]:
    """Keeps all processes that obey file modes from opening anything in the folder."""
    mode = folder.stat().st_mode
    folder.chmod(0)
    try:
        yield
    finally:
        folder.chmod(mode)


@contextmanager
def half_open(port: int, connections: int) -> Iterator[None]:
    """Opens requests that never end, all at once."""
    with ExitStack() as opened:
        for _ in range(connections):
            with suppress(OSError):
                one = opened.enter_context(socket.create_connection((HOST, port), timeout=1))
                one.sendall(b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\n")
        yield
