"""Three servers, one of them the master, and three Sentinels that promote another one when the master fails. They are
configured with the lines in services/dvp_rl/transport/README.md."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any, Self

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, TimeoutError
from redis.retry import Retry

from dvp_rl.ports import HOST, ReservedPort
from dvp_rl.transport.embedded import EmbeddedBroker, valkey_binary
from dvp_rl.transport.roles import Role
from tests.kit.processes import ROOT
from tests.kit.wait import until

NAME = "dvp"
SENTINEL_PASSWORD = "for-those-who-ask"
_ON_SERVER, _ON_SENTINEL = re.findall(
    r"^```conf\n(.*?)^```", (ROOT / "services/dvp_rl/transport/README.md").read_text(), re.DOTALL | re.MULTILINE
)


def _filled(text: str, port: int) -> str:
    words = {"NAME": NAME, "HOST": HOST, "PORT": str(port), "SENTINELS": SENTINEL_PASSWORD}
    return re.sub(r"\b[A-Z]+\b", lambda word: words.get(word[0], f"secret-{word[0].lower()}"), text)


class Server(EmbeddedBroker):
    """A server with the passwords of the first one, which is the initial master."""

    def __init__(self, folder: Path, first: Server | None, binary: Path | None) -> None:
        super().__init__(folder, aof=True, binary=binary)
        self._first = first
        if first:
            self.password, self._passwords = first.password, first._passwords

    def _config(self) -> str:
        own = super()._config() + _filled(_ON_SERVER, 0) + "repl-diskless-sync-delay 0\n"
        return own + (f"replicaof {HOST} {self._first.port}\n" if self._first else "")

    def signal(self, number: signal.Signals) -> None:
        assert self.pid is not None
        os.kill(self.pid, number)

    def ask(self, *command: str) -> Any:
        """Reply to a command sent as the user with all permissions; None while the server does not answer."""
        return _ask(self.port, self.password, *command)

    @property
    def copies(self) -> bool:
        """Whether this is a replica connected to its master."""
        return self._replication.get("master_link_status") == "up"

    @property
    def num_copies(self) -> int:
        """Number of servers that replicate from this one."""
        return int(self._replication.get("connected_slaves", 0))

    @property
    def _replication(self) -> dict[str, Any]:
        return self.ask("INFO", "replication") or {}


class Sentinels(AbstractContextManager["Sentinels"]):
    """`with Sentinels(folder) as sentinels: sentinels.url_of(Role.TRAINER)`. `folder` holds data and logs."""

    def __init__(self, folder: Path, binary: Path | None = None) -> None:
        self._folder, self._binary = folder, binary or valkey_binary()
        first = Server(folder / "0", None, binary)
        self.servers = [first, *(Server(folder / str(number), first, binary) for number in (1, 2))]
        self._reserved = [ReservedPort() for _ in range(3)]
        self._stack = ExitStack()
        self.processes: list[subprocess.Popen[bytes]] = []
        """Processes of the Sentinels; all are killed at the end, also stopped ones."""

    @property
    def ports(self) -> list[int]:
        return [reserved.number for reserved in self._reserved]

    def url_of(self, role: Role | None = None, name: str = NAME, password: str = SENTINEL_PASSWORD) -> str:
        """URL for the user of `role`; without a role, for the user with all permissions. `password`: the Sentinels'."""
        user = f":{self.servers[0].password}" if role is None else f"{role}:{self.servers[0]._passwords[role]}"
        hosts = ",".join(f"{HOST}:{port}" for port in self.ports)
        return f"redis+sentinel://{user}@{hosts}/{name}?sentinel_password={password}"

    @property
    def master(self) -> Server:
        """The master according to most Sentinels."""
        masters = [_ask(port, SENTINEL_PASSWORD, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME) for port in self.ports]
        _, most = max(filter(None, masters), key=masters.count)
        return next(server for server in self.servers if server.port == int(most))

    def await_another(self, than: Server) -> Server:
        """The next master, as soon as a replica follows it."""
        until(lambda: self.master is not than and self.master.num_copies, "another master")
        return self.master

    def await_copy(self, server: Server) -> None:
        until(lambda: server.copies, f"{server.port} copies the master")

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for server in self.servers:
                stack.enter_context(server)
            until(lambda: self.servers[0].num_copies == 2, "two servers copy the first")
            for number, port in enumerate(self.ports):
                process = stack.enter_context(self._start(self._folder / f"sentinel-{number}", port))
                stack.callback(process.kill)
                self.processes.append(process)
            until(lambda: all(self._agree(port) for port in self.ports), "the Sentinels know each other")
            self._stack = stack.pop_all()
        return self

    def _start(self, folder: Path, port: int) -> subprocess.Popen[bytes]:
        folder.mkdir()
        # The Sentinel saves its state in this file.
        config = folder / "sentinel.conf"
        config.write_text(f"bind {HOST}\nport {port}\ndir {folder}\n{_filled(_ON_SENTINEL, self.servers[0].port)}")
        with (folder / "log").open("wb") as log:
            return subprocess.Popen([self._binary, config, "--sentinel"], stdout=log, stderr=log)

    def _agree(self, port: int) -> bool:
        known = (_ask(port, SENTINEL_PASSWORD, "INFO", "sentinel") or {}).get("master0", {})
        return (known.get("status"), known.get("slaves"), known.get("sentinels")) == ("ok", 2, 3)

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _ask(port: int | None, password: str, *command: str) -> Any:
    asked = Redis(host=HOST, port=port or 0, password=password, socket_timeout=2.0, retry=Retry(NoBackoff(), 0))
    with asked, suppress(ConnectionError, TimeoutError):
        return asked.execute_command(*command)
