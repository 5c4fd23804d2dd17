"""How an SGLang server is started, and how one that runs elsewhere is reached."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from dvp_rl.contract.errors import ConfigError
from dvp_rl.ports import HOST

from . import server
from .server import Keys, Secret
from .sglang_client import SglangClient

CONTEXT_MARGIN = 8
"""Extra tokens of context: SGLang ends a sample up to 6 tokens before its limit; the engine uses its whole context."""
CPU_TOKENS = 65_536
# Without --sleep-on-idle, an idle server keeps a core busy.
CPU_FLAGS = ("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--sleep-on-idle")
CHECKOUT_PYTHON = Path(__file__).parents[3] / ".sglang" / "bin" / "python"
"""Interpreter of the environment that `make sglang-cpu` builds in a checkout."""


@dataclass(frozen=True)
class Launch(server.Launch[SglangClient]):
    """Settings for starting SGLang. None leaves the choice to it."""

    TITLE = "SGLang"
    SECTION = "sglang"
    MODULE = "sglang.launch_server"
    PACKAGES = ("sglang", "dvp_sglang")

    dp: int = 1
    fp32_head: bool = False
    mem_fraction_static: float | None = None
    max_total_tokens: int | None = None
    """Capacity of the KV cache, in tokens. None: 65,536 on a CPU, where SGLang cannot tell how much memory is free."""
    deterministic: bool = False
    interface: str | None = None
    """Network interface for traffic between SGLang's processes and for the trainer's weights. None: loopback."""

    def __post_init__(self) -> None:
        super().__post_init__()
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
        cpu = {"SGLANG_USE_CPU_ENGINE": "1"} if self.device == "cpu" else {}
        # CONTEXT_MARGIN goes beyond the model's own context, but no position beyond that is ever computed.
        ours = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
        # torch's rendezvous would listen on every interface. With dp > 1, each copy of the model needs and has its own.
        local = {"GLOO_SOCKET_IFNAME": self.interface or "lo"}
        if self.interface:
            local["NCCL_SOCKET_IFNAME"] = self.interface
        if self.dp == 1:
            local["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{scratch / 'rendezvous'}"
        return self.inherited() | local | ours | cpu

    def secret(self, keys: Keys) -> Secret:
        return Secret(["--api-key", keys.api, "--admin-api-key", keys.admin], {})

    def client(self, url: str, keys: Keys) -> SglangClient:
        return SglangClient(url, api_key=keys.api, admin_key=keys.admin)


@dataclass(frozen=True)
class Remote(server.Remote[SglangClient]):
    TITLE = "SGLang"
    SECTION = "sglang"

    admin_key: str = ""
    """Empty: the API key."""

    def client(self) -> SglangClient:
        return SglangClient(self.url, api_key=self.api_key, admin_key=self.admin_key)


def default_python() -> Path:
    """The interpreter of the checkout's SGLang environment if it exists, else this one."""
    return CHECKOUT_PYTHON if CHECKOUT_PYTHON.exists() else Path(sys.executable)
