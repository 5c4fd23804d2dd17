"""An inference server, either run by this replica as a process or run elsewhere.

The process listens on loopback only, requires random keys, writes to a log file, leads its own process group, and ends
with the replica, even if that is killed (server_stub.py).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, NamedTuple, TypeVar

from dvp_rl.cancellation import finished
from dvp_rl.contract.errors import ConfigError
from dvp_rl.ports import HOST, ReservedPort

from .server_client import ServerClient

log = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16")
STUB = Path(__file__).with_name("server_stub.py")
POLL_S = 0.2
GRACE_S = 2.0
"""Time for the server's helpers to unlink its shared memory, in seconds."""
LAST_LINES = 12


C = TypeVar("C", bound=ServerClient)


class Keys(NamedTuple):
    api: str
    admin: str


class Secret(NamedTuple):
    """How a server is told its keys, other than on its command line."""

    flags: list[str]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Launch(ABC, Generic[C]):
    """Settings for starting a server. None leaves the choice to it."""

    TITLE: ClassVar[str]
    """Name of the program, for messages."""
    SECTION: ClassVar[str]
    """Name of its settings."""
    MODULE: ClassVar[str]
    """Python module that runs the server."""
    PACKAGES: ClassVar[tuple[str, ...]]
    """What its interpreter must be able to import: the server and our plugin."""

    python: Path
    """Interpreter of an environment with the server and our plugin."""
    dtype: str = "float32"
    device: str = "cpu"
    max_batch: int = 64
    tp: int = 1
    threads: int | None = None
    port: int = 0
    """0: a free port, chosen at every start."""
    extra_args: tuple[str, ...] = ()
    """Further flags of the server; they override the others."""
    ready_timeout_s: float = 600.0
    log_file: Path | None = None
    """None: a file in the temporary folder."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r}: {self.TITLE} allows {', '.join(DTYPES)}")

    @abstractmethod
    def flags(self, folder: Path, version: str, port: int, context_length: int) -> list[str]:
        """The command line."""

    @abstractmethod
    def environment(self, scratch: Path) -> dict[str, str]:
        """All environment variables. `scratch`: an empty folder."""

    @abstractmethod
    def secret(self, keys: Keys) -> Secret: ...

    @abstractmethod
    def client(self, url: str, keys: Keys) -> C: ...

    def inherited(self) -> dict[str, str]:
        """This process's environment without our settings and secrets."""
        threads = {} if self.threads is None else {"OMP_NUM_THREADS": str(self.threads)}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DVP_ROLLOUT__")}
        return kept | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"} | threads


class LocalServer(Generic[C]):
    """A server run as our own process; `start` may be called again after it ended."""

    def __init__(self, launch: Launch[C], context_length: int) -> None:
        self._launch = launch
        self._context_length = context_length
        self._process: asyncio.subprocess.Process | None = None
        self._log_file = launch.log_file
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self.client = launch.client("http://not-started", Keys("", ""))

    @property
    def device(self) -> str:
        return self._launch.device

    async def start(self, folder: Path, version: str) -> None:
        """Starts the server and waits until it accepts requests. Raises ConfigError with the end of its log."""
        await self.stop()
        port = self._reserve()
        await self.client.close()
        keys = Keys(secrets.token_hex(32), secrets.token_hex(32))
        self.client = self._launch.client(f"http://{HOST}:{port.number}", keys)
        flags = self._launch.flags(folder, version, port.number, self._context_length)
        try:
            process = await finished(self._spawn(flags, self._launch.secret(keys)))
            log.info(
                "%s starts as process %d on port %d, its log is %s",
                *(self._launch.TITLE, process.pid, port.number, self._log_file),
            )
            await self._wait_ready(process)
        except BaseException:
            await self.stop()
            raise
        finally:
            port.release()

    def _reserve(self) -> ReservedPort:
        port = self._launch.port
        try:
            return ReservedPort(port)
        except OSError as error:
            setting = f"{self._launch.SECTION}.port {port}"
            raise ConfigError(f"{setting}: {error.strerror}; choose another one, or 0 for a free one") from None

    async def _spawn(self, flags: list[str], secret: Secret) -> asyncio.subprocess.Process:
        prefix = f"dvp-{self._launch.SECTION}-"
        if self._log_file is None:
            handle, name = tempfile.mkstemp(prefix=prefix, suffix=".log")
            os.close(handle)
            self._log_file = Path(name)
        self._scratch = tempfile.TemporaryDirectory(prefix=prefix)
        try:
            with self._log_file.open("wb") as output:
                self._process = process = await asyncio.create_subprocess_exec(
                    self._launch.python,
                    STUB,
                    self._launch.MODULE,
                    *flags,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    # Not our working directory: its packages must not shadow those of the server's environment.
                    cwd=self._log_file.parent,
                    env=self._launch.environment(Path(self._scratch.name)),
                    start_new_session=True,
                )
        except OSError as error:
            title, python = self._launch.TITLE, self._launch.python
            raise ConfigError(f"{title} cannot be started with {python}: {error}") from None
        assert process.stdin is not None, "stdin is a pipe"
        given = secret._asdict() | {"packages": self._launch.PACKAGES, "section": self._launch.SECTION}
        process.stdin.write(json.dumps(given).encode() + b"\n")
        return process

    async def _wait_ready(self, process: asyncio.subprocess.Process) -> None:
        title, timeout_s = self._launch.TITLE, self._launch.ready_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.client.is_ready():
                    if process.returncode is not None:
                        raise ConfigError(f"{title} {_how(process)} before it was ready. {self._last_words()}")
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            waited = f"not ready within {self._launch.SECTION}.ready_timeout_s = {timeout_s:g} s"
            raise ConfigError(f"{title} was {waited}. {self._last_words()}") from None

    async def ended(self) -> str:
        """Waits until the server ends; returns how it ended."""
        process = self._process
        assert process is not None, "started"
        await process.wait()
        return f"{self._launch.TITLE} {_how(process)}. {self._last_words()}"

    async def stop(self) -> None:
        """Kills the server's processes."""
        process, self._process = self._process, None
        if process is not None:
            await finished(_kill(process))
        if self._scratch is not None:
            self._scratch.cleanup()

    def _last_words(self) -> str:
        lines = "\n".join(f"  {line}" for line in _tail(self._log_file)) or "  (nothing)"
        return f"The end of {self._log_file}:\n{lines}"


@dataclass(frozen=True)
class Remote(ABC, Generic[C]):
    """A server that is run elsewhere, for this replica alone, and sees weight folders under the same paths."""

    TITLE: ClassVar[str]
    """Name of the program, for messages."""
    SECTION: ClassVar[str]
    """Name of its settings."""

    url: str
    api_key: str = ""
    ready_timeout_s: float = 600.0

    @abstractmethod
    def client(self) -> C: ...


class RemoteServer(Generic[C]):
    """A server that this replica neither starts nor stops."""

    def __init__(self, remote: Remote[C]) -> None:
        self._remote = remote
        self.client = remote.client()

    async def start(self, folder: Path, version: str) -> None:
        """Waits until the server accepts requests. Raises ConfigError."""
        remote = self._remote
        try:
            async with asyncio.timeout(remote.ready_timeout_s):
                while not await self.client.is_ready():  # noqa: ASYNC110 - polls another machine
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            section, title = remote.SECTION, remote.TITLE
            waited = f"within {section}.ready_timeout_s = {remote.ready_timeout_s:g} s"
            raise ConfigError(f"{section}.url {remote.url}: no {title} server was ready there {waited}") from None

    async def ended(self) -> str:
        """Never returns: only health checks can tell that a remote server ended."""
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def stop(self) -> None:
        """Does nothing: the server keeps running."""


async def _kill(leader: asyncio.subprocess.Process) -> None:
    """Sends SIGKILL at once: nothing in the server is worth the time that it takes over SIGTERM. Its processes end with
    it; any left in the group after GRACE_S are killed too, and get as long to disappear."""
    with suppress(ProcessLookupError):
        leader.kill()
    await leader.wait()
    with suppress(ProcessLookupError):
        for final in (0, signal.SIGKILL):
            os.killpg(leader.pid, final)
            for _ in range(int(GRACE_S / POLL_S)):
                await asyncio.sleep(POLL_S)
                os.killpg(leader.pid, 0)


def _how(process: asyncio.subprocess.Process) -> str:
    code = process.returncode
    assert code is not None, "ended"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _tail(file: Path | None) -> Iterator[str]:
    with suppress(OSError):
        if file is not None:
            yield from file.read_text(errors="replace").splitlines()[-LAST_LINES:]
