"""Settings of `dvp-rollout`."""

from __future__ import annotations

import os
import secrets
import shlex
import socket
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, SecretStr, field_validator
from pydantic_settings import SettingsConfigDict

from dvp_rl.contract.engine import EngineName
from dvp_rl.contract.shape import ShapeText
from dvp_rl.contract.weights import RUN_ID
from dvp_rl.hooks import choice_or_hook
from dvp_rl.http.settings import ListenSettings, WeightReader
from dvp_rl.settings import Section
from dvp_rl.tracing import TraceUrl
from dvp_rl.transport.urls import RedisUrl


def _replica_id() -> str:
    host = "".join(c if c.isalnum() or c in "-." else "-" for c in socket.gethostname())
    return f"{host[:40]}-{os.getpid()}-{secrets.token_hex(2)}"


class FakeSettings(Section):
    """Only for engine = fake."""

    service_time_s: Annotated[float, Field(ge=0)] = 0.05
    """Time that every sample takes."""
    num_tokens: Annotated[int, Field(ge=1)] = 32
    """Length of every sample."""
    load_time_s: Annotated[float, Field(ge=0)] = 0.0
    """Time that a weight swap takes."""


class ServerSettings(Section):
    """An inference server that a replica starts, or uses."""

    python: Path | None = None
    """Python that has the server and our plugin. Default: that of this checkout's environment, which make sglang-cpu or
    make vllm-cpu builds, else the one running."""
    url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """URL of a server to use instead of starting one. It must see weight folders under the same paths."""
    api_key: SecretStr = SecretStr("")
    """That server's API key."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the server on 127.0.0.1; 0 takes a free one."""
    tp: Annotated[int, Field(ge=1)] = 1
    """GPUs that share one copy of the model."""
    extra_args: str = ""
    """More flags for the server, as in a shell; they override those above."""
    ready_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest time for the server to start."""
    load_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest time for the server to read or receive new weights."""
    log_file: Path | None = None
    """File for its output, overwritten at every start. Default: a file in the temporary folder, named in the log."""

    @field_validator("extra_args")
    @classmethod
    def _words(cls, extra_args: str) -> str:
        shlex.split(extra_args)
        return extra_args


class SglangSettings(ServerSettings):
    """Only for engine = sglang."""

    admin_key: SecretStr = SecretStr("")
    """The admin key of the server at url. Default: the API key."""
    dp: Annotated[int, Field(ge=1)] = 1
    """Copies of the model."""
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the GPU's memory for weights and KV cache. Default: SGLang's choice."""
    max_total_tokens: Annotated[int, Field(ge=16)] | None = None
    """Capacity of the KV cache in tokens. Default: SGLang's choice, on a CPU 65536."""
    interface: str | None = None
    """Network interface on which weights come from a trainer on another machine (its weights.route = distributed)."""


class VllmSettings(ServerSettings):
    """Only for engine = vllm."""

    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the GPU's memory for weights and KV cache. Default: vLLM's choice."""
    cpu_kv_cache_gib: Annotated[int, Field(ge=1)] | None = None
    """Memory for the KV cache on a CPU, in GiB. Default: 1."""


class WeightSettings(WeightReader):
    """Weights that are announced with a URL, for a replica without the trainer's volume."""

    cache: Path = Path("~/.cache/dvp-rl/weights")
    """Folder for downloads; replicas of one host may share it."""
    shared: bool = True
    """Read the announced folder if it is visible. Off: always download, e.g. because that volume is slow."""
    timeout_s: Annotated[float, Field(gt=0)] = 3600.0
    """Longest time to download one version; the next attempt resumes with what has arrived."""


class RolloutSettings(ListenSettings):
    """Serves a rollout replica, over HTTP and, with --redis-url, for a trainer."""

    model_config = SettingsConfigDict(env_prefix="DVP_ROLLOUT__", cli_prog_name="dvp-rollout")
    usage: ClassVar[str] = "--model FOLDER [options]"

    model: Path
    """Folder of a Hugging Face causal LM: config, tokenizer, safetensors."""
    engine: Annotated[str, AfterValidator(partial(choice_or_hook, EngineName))] = EngineName.TRANSFORMERS
    """What generates: `transformers` in this process, an `sglang` or `vllm` server beside it, `fake` for load tests, or
    your own engine as module:function."""
    redis_url: RedisUrl | None = None
    """redis://[user:password@]host:port/0 of the broker, or redis+sentinel://[...@]host:port,host:port/NAME.
    Without it only HTTP is served."""
    run_id: Annotated[str, Field(pattern=RUN_ID)] = "default"
    """The training run whose jobs are taken."""
    replica_id: Annotated[str, Field(pattern=RUN_ID)] = Field(default_factory=_replica_id)
    """Name of this replica, unique within the run. Default: host, process id and a random part."""

    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Number format in which the model computes."""
    fp32_head: bool = False
    """Compute the LM head in float32 whatever dtype is, as a trainer with model.fp32_head does."""
    device: str = "cpu"
    """Where the transformers engine computes: cpu, cuda or cuda:N."""
    max_batch: Annotated[int, Field(ge=1, le=4096)] = 32
    """Samples that generate side by side."""
    max_context: Annotated[int, Field(ge=2)] | None = None
    """Tokens of prompt and continuation together. Default: what the model allows."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads of the engine. Default: one per CPU that it may use, or the server's choice."""
    deterministic: bool = False
    """One job is one batch, so that a seed gives the same bits every time."""
    fixed_shape: ShapeText | None = None
    """ROWSxLENGTH: one full forward of this shape per token, so that a trainer with the same shape gets the same bits.
    Slow; only for engine = transformers."""

    prefix_cache_mib: Annotated[int, Field(ge=0)] = 256
    """Memory for keys and values of prompts and answers, so that the next turn of a conversation reads only what is
    new. Only for engine = transformers, and not with deterministic or fixed_shape. Servers have caches of their own."""

    fake: FakeSettings = FakeSettings()
    sglang: SglangSettings = SglangSettings()
    vllm: VllmSettings = VllmSettings()
    weights: WeightSettings = WeightSettings()

    max_waiting: Annotated[int, Field(ge=0)] = 128
    """Samples of HTTP requests that may wait; further requests get 429."""
    client_share: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Share of max_batch for jobs and HTTP requests of clients while a trainer holds the run; at least one sample."""
    max_queued: Annotated[int, Field(ge=1)] = 1000
    """Jobs of clients that may wait unread in the queue before POST /v1/jobs answers 429."""
    canary_every_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds between two checks that the engine still computes what the trainer does under the same weights. It is
    checked after every swap as well."""
    lease_s: Annotated[float, Field(ge=0.5, le=3600)] = 60.0
    """Seconds of silence after which a replica's job goes to another one."""
    max_deliveries: Annotated[int, Field(ge=1, le=100)] = 3
    """Engine errors and crashes of replicas after which a job becomes a dead letter."""
    job_timeout_s: Annotated[float, Field(gt=0)] = 3600.0
    """Longest time for one job, including the wait for its weights; for a client's job, per part that generates."""
    trace_url: TraceUrl | None = None
    """Collector of OpenTelemetry traces, e.g. http://127.0.0.1:4318; needs the extra otel."""
    drain_s: Annotated[float, Field(ge=0, le=3600)] = 3.0
    """Longest time that jobs may take to finish after SIGTERM before they are given back."""
