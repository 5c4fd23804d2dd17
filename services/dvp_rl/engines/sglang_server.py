"""An SGLang server, either run by this replica as a process or run elsewhere.

The process listens on loopback only, requires two random keys, writes to a log file, leads its own process group, and
ends with the replica, even if that is killed (sglang_launch.py).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dvp_rl.cancellation import finished
from dvp_rl.contract.errors import ConfigError
from dvp_rl.ports import HOST, ReservedPort

from .sglang_client import SglangClient

log = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16")
STUB = Path(__file__).with_name("sglang_launch.py")
POLL_S = 0.2
GRACE_S = 2.0
"""Time for the server's helpers to unlink its shared memory, in seconds."""
LAST_LINES = 12
CONTEXT_MARGIN = 8
"""Extra tokens of context: SGLang ends a sample up to 6 tokens before its limit; the engine uses its whole context."""
CPU_TOKENS = 65_536
# Without --sleep-on-idle, an idle server keeps a core busy.
CPU_FLAGS = ("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--sleep-on-idle")
CHECKOUT_PYTHON = Path(__file__).parents[3] / ".sglang" / "bin" / "python"
"""Interpreter of the environment that `make sglang-cpu` builds in a checkout."""


@dataclass(frozen=True)
class Launch:
    """Settings for starting a server. None leaves the choice to SGLang."""

    python: Path
    """Interpreter of an environment with SGLang and the dvp-sglang plugin."""
    dtype: str = "float32"
    fp32_head: bool = False
    device: str = "cpu"
    max_batch: int = 64
    tp: int = 1
    dp: int = 1
    mem_fraction_static: float | None = None
    max_total_tokens: int | None = None
    """Capacity of the KV cache, in tokens. None: 65,536 on a CPU, where SGLang cannot tell how much memory is free."""
    deterministic: bool = False
    threads: int | None = None
    port: int = 0
    """0: a free port, chosen at every start."""
    extra_args: tuple[str, ...] = ()
    """Further flags of sglang.launch_server; they override the others."""
    interface: str | None = None
    """Network interface for traffic between SGLang's processes and for the trainer's weights. None: loopback."""
    ready_timeout_s: float = 600.0
    log_file: Path | None = None
    """None: a file in the temporary folder."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r}: SGLang allows {', '.join(DTYPES)}")
        if self.deterministic and self.device == "cpu":
            raise ConfigError("deterministic: SGLang supports it only on a GPU; use the transformers engine on a CPU")

    def flags(self, folder: Path, version: str, port: int, context_length: int) -> list[str]:
        total = self.max_total_tokens or (CPU_TOKENS if self.device == "cpu" else None)
        named = {
            "model-path": folder.absolute(),
            "host": HOST,
            "port": port,
            "weight-version": version,
            # Never load a pickle, wherever the folder comes from.
            "load-format": "safetensors",
            "device": self.device,
            "dtype": self.dtype,
            "context-length": context_length + CONTEXT_MARGIN if context_length else None,
            "max-running-requests": self.max_batch,
            "tp-size": self.tp,
            "dp-size": self.dp,
            "mem-fraction-static": self.mem_fraction_static,
            "max-total-tokens": total,
            "log-level": "warning",
        }
        flags = [part for name, value in named.items() if value is not None for part in (f"--{name}", str(value))]
        flags += CPU_FLAGS if self.device == "cpu" else ()
        flags += ["--enable-deterministic-inference"] if self.deterministic else []
        flags += ["--enable-fp32-lm-head"] if self.fp32_head else []
        # Urgent requests come before those that wait, but end none that runs.
        flags += ["--enable-priority-scheduling", "--disable-priority-preemption"]
        return [*flags, "--skip-server-warmup", *self.extra_args]

    def environment(self, scratch: Path) -> dict[str, str]:
        """This process's environment without our settings and secrets, plus SGLang's. `scratch`: an empty folder."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DVP_ROLLOUT__")}
        threads = {} if self.threads is None else {"OMP_NUM_THREADS": str(self.threads)}
        cpu = {"SGLANG_USE_CPU_ENGINE": "1"} if self.device == "cpu" else {}
        # CONTEXT_MARGIN goes beyond the model's own context, but no position beyond that is ever computed.
        ours = {"HF_HUB_OFFLINE": "1", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1", "PYTHONUNBUFFERED": "1"}
        # torch's rendezvous would listen on every interface. With dp > 1, each copy of the model needs and has its own.
        local = {"GLOO_SOCKET_IFNAME": self.interface or "lo"}
        if self.interface:
            local["NCCL_SOCKET_IFNAME"] = self.interface
        if self.dp == 1:
            local["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{scratch / 'rendezvous'}"
        return kept | local | ours | threads | cpu


class LocalServer:
    """A server run as our own process; `start` may be called again after it ended."""

    def __init__(self, launch: Launch, context_length: int) -> None:
        self._launch = launch
        self._context_length = context_length
        self._process: asyncio.subprocess.Process | None = None
        self._log_file = launch.log_file
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self.client = SglangClient("http://not-started")

    @property
    def device(self) -> str:
        return self._launch.device

    async def start(self, folder: Path, version: str) -> None:
        """Starts the server and waits until it accepts requests. Raises ConfigError with the end of its log."""
        await self.stop()
        port = _reserve(self._launch.port)
        await self.client.close()
        api_key, admin_key = secrets.token_hex(32), secrets.token_hex(32)
        self.client = SglangClient(f"http://{HOST}:{port.number}", api_key=api_key, admin_key=admin_key)
        keys = ["--api-key", api_key, "--admin-api-key", admin_key]
        flags = self._launch.flags(folder, version, port.number, self._context_length)
        try:
            process = await finished(self._spawn(flags, keys))
            log.info("SGLang starts as process %d on port %d, its log is %s", process.pid, port.number, self._log_file)
            await self._wait_ready(process)
        except BaseException:
            await self.stop()
            raise
        finally:
            port.release()

    async def _spawn(self, flags: list[str], secret_flags: list[str]) -> asyncio.subprocess.Process:
        if self._log_file is None:
            handle, name = tempfile.mkstemp(prefix="dvp-sglang-", suffix=".log")
            os.close(handle)
            self._log_file = Path(name)
        self._scratch = tempfile.TemporaryDirectory(prefix="dvp-sglang-")
        try:
            with self._log_file.open("wb") as output:
                self._process = process = await asyncio.create_subprocess_exec(
                    self._launch.python,
                    STUB,
                    *flags,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    # Not our working directory: its packages must not shadow those of SGLang's environment.
                    cwd=self._log_file.parent,
                    env=self._launch.environment(Path(self._scratch.name)),
                    start_new_session=True,
                )
        except OSError as error:
            raise ConfigError(f"SGLang cannot be started with {self._launch.python}: {error}") from None
        assert process.stdin is not None, "stdin is a pipe"
        process.stdin.write(json.dumps(secret_flags).encode() + b"\n")
        return process

    async def _wait_ready(self, process: asyncio.subprocess.Process) -> None:
        timeout_s = self._launch.ready_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.client.is_ready():
                    if process.returncode is not None:
                        raise ConfigError(f"SGLang {_how(process)} before it was ready. {self._last_words()}")
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            remedy = f"not ready within sglang.ready_timeout_s = {timeout_s:g} s"
            raise ConfigError(f"SGLang was {remedy}. {self._last_words()}") from None

    async def ended(self) -> str:
        """Waits until the server ends; returns how it ended."""
        process = self._process
        assert process is not None, "started"
        await process.wait()
        return f"SGLang {_how(process)}. {self._last_words()}"

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
class Remote:
    """A server that is run elsewhere, for this replica alone, and sees weight folders under the same paths."""

    url: str
    api_key: str = ""
    admin_key: str = ""
    """Empty: the API key."""
    ready_timeout_s: float = 600.0


class RemoteServer:
    """A server that this replica neither starts nor stops."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self.client = SglangClient(remote.url, api_key=remote.api_key, admin_key=remote.admin_key)

    async def start(self, folder: Path, version: str) -> None:
        try:
            async with asyncio.timeout(self._remote.ready_timeout_s):
                while not await self.client.is_ready():  # noqa: ASYNC110 - polls another machine
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            waited = f"within sglang.ready_timeout_s = {self._remote.ready_timeout_s:g} s"
            raise ConfigError(f"sglang.url {self._remote.url}: no SGLang server was ready there {waited}") from None

    async def ended(self) -> str:
        """Never returns: only health checks can tell that a remote server ended."""
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def stop(self) -> None:
        """Does nothing: the server keeps running."""


def default_python() -> Path:
    """The interpreter of the checkout's SGLang environment if it exists, else this one."""
    return CHECKOUT_PYTHON if CHECKOUT_PYTHON.exists() else Path(sys.executable)


def _reserve(port: int) -> ReservedPort:
    """Raises ConfigError if the port cannot be reserved."""
    try:
        return ReservedPort(port)
    except OSError as error:
        raise ConfigError(f"sglang.port {port}: {error.strerror}; choose another one, or 0 for a free one") from None


async def _kill(leader: asyncio.subprocess.Process) -> None:
    """Sends SIGKILL at once: nothing in the server is worth the 5 s that it takes over SIGTERM. Its processes end with
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
