"""How a vLLM server is started, and how one that runs elsewhere is reached."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from dvp_rl.contract.errors import ConfigError
from dvp_rl.ports import HOST

from . import server
from .server import Keys, Secret
from .vllm_client import VllmClient

PLUGIN = "dvp_vllm.vllm_plugin"
KEY = "DVP_VLLM_KEY"
# On a CPU, vLLM dies of a prompt that it reads in parts if the request has a seed.
CPU_FLAGS = ("--enforce-eager", "--no-enable-chunked-prefill")
CHECKOUT_PYTHON = Path(__file__).parents[3] / ".vllm" / "bin" / "python"
"""Interpreter of the environment that `make vllm-cpu` builds in a checkout."""


@dataclass(frozen=True)
class Launch(server.Launch[VllmClient]):
    """Settings for starting vLLM. None leaves the choice to it."""

    TITLE = "vLLM"
    SECTION = "vllm"
    MODULE = "vllm.entrypoints.openai.api_server"
    PACKAGES = ("vllm", "dvp_vllm")

    gpu_memory_utilization: float | None = None
    """Share of the GPU's memory for weights and KV cache."""
    cpu_kv_cache_gib: int | None = None
    """Memory for the KV cache on a CPU. None: 1 GiB."""

    def __post_init__(self) -> None:
        super().__post_init__()
        on_cpu = self.device == "cpu"
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"device {self.device}: vLLM allows cpu, cuda; CUDA_VISIBLE_DEVICES chooses its GPUs")
        if on_cpu and self.gpu_memory_utilization is not None:
            raise ConfigError("vllm.gpu_memory_utilization: only on a GPU; on a CPU set vllm.cpu_kv_cache_gib")
        if not on_cpu and self.cpu_kv_cache_gib is not None:
            raise ConfigError("vllm.cpu_kv_cache_gib: only on a CPU; on a GPU set vllm.gpu_memory_utilization")

    def flags(self, folder: Path, version: str, port: int, context_length: int) -> list[str]:
        named = {
            "model": folder.absolute(),
            "host": HOST,
            "port": port,
            # Never load a pickle, wherever the folder comes from.
            "load-format": "safetensors",
            # No sampling defaults from the model's folder.
            "generation-config": "vllm",
            "dtype": self.dtype,
            "max-model-len": context_length or None,
            "max-num-seqs": self.max_batch,
            "tensor-parallel-size": self.tp,
            "gpu-memory-utilization": self.gpu_memory_utilization,
            "logprobs-mode": "processed_logprobs",
            "scheduling-policy": "priority",
            "worker-extension-cls": f"{PLUGIN}.worker.WorkerExtension",
            "middleware": f"{PLUGIN}.guard.RequireKey",
            "uvicorn-log-level": "warning",
        }
        flags = [part for name, value in named.items() if value is not None for part in (f"--{name}", str(value))]
        flags += [
            "--enable-scale-out",
            "--enable-prompt-tokens-details",
            "--disable-access-log-for-endpoints",
            "/health",
        ]
        flags += CPU_FLAGS if self.device == "cpu" else ()
        return [*flags, *self.extra_args]

    def environment(self, scratch: Path) -> dict[str, str]:
        ours = {
            # Its routes for swaps; the plugin lets none through without the key.
            "VLLM_SERVER_DEV_MODE": "1",
            # The newer sampler neither calls the plugin nor runs on a CPU.
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_HOST_IP": HOST,
        }
        cpu = {"VLLM_CPU_KVCACHE_SPACE": str(self.cpu_kv_cache_gib or 1), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return self.inherited() | ours | (cpu if self.device == "cpu" else {})

    def secret(self, keys: Keys) -> Secret:
        return Secret([], {KEY: keys.api})

    def client(self, url: str, keys: Keys) -> VllmClient:
        return VllmClient(url, api_key=keys.api)


@dataclass(frozen=True)
class Remote(server.Remote[VllmClient]):
    TITLE = "vLLM"
    SECTION = "vllm"

    def client(self) -> VllmClient:
        return VllmClient(self.url, api_key=self.api_key)


def default_python() -> Path:
    """The interpreter of the checkout's vLLM environment if it exists, else this one."""
    return CHECKOUT_PYTHON if CHECKOUT_PYTHON.exists() else Path(sys.executable)
