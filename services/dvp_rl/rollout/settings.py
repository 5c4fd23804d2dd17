"""What `dvp-rollout` can be told."""

from __future__ import annotations

import os
import secrets
import shlex
import socket
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import SettingsConfigDict

from dvp_rl.contract.shape import ShapeText
from dvp_rl.contract.weights import RUN_ID
from dvp_rl.http.settings import MAX_REQUESTS, ListenSettings, WeightReader
from dvp_rl.settings import Section
from dvp_rl.tracing import TraceUrl
from dvp_rl.transport.connection import RedisUrl


class EngineName(StrEnum):
    TRANSFORMERS = "transformers"
    SGLANG = "sglang"
    FAKE = "fake"


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


class SglangSettings(Section):
    """Only for engine = sglang."""

    python: Path | None = None
    """Interpreter that has SGLang and dvp-sglang. Default: .sglang/bin/python of this checkout, or this one."""
    url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """Use the server there instead of starting one. It has to see weight folders under the same paths."""
    api_key: SecretStr = SecretStr("")
    """That server's API key."""
    admin_key: SecretStr = SecretStr("")
    """That server's admin key. Default: the API key."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the server on 127.0.0.1; 0 takes a free one."""
    tp: Annotated[int, Field(ge=1)] = 1
    """GPUs that share one copy of the model."""
    dp: Annotated[int, Field(ge=1)] = 1
    """Copies of the model."""
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the GPU's memory for weights and KV cache. Default: SGLang's choice."""
    max_total_tokens: Annotated[int, Field(ge=16)] | None = None
    """Tokens that fit the KV cache. Default: SGLang's choice, on a CPU 65536."""
    extra_args: str = ""
    """More flags for SGLang, as in a shell; they override those above."""
    ready_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest time for SGLang to start."""
    load_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest time for SGLang to read or receive new weights."""
    interface: str | None = None
    """Network interface on which weights come from a trainer on another machine (its weights.route = distributed)."""
    log_file: Path | None = None
    """Where its output goes, anew at every start. Default: a file in the temporary folder, named in the log."""

    @field_validator("extra_args")
    @classmethod
    def _words(cls, extra_args: str) -> str:
        shlex.split(extra_args)
        return extra_args


class WeightSettings(WeightReader):
    """Weights that are announced with a URL and lie on no volume that this replica sees."""

    cache: Path = Path("~/.cache/dvp-rl/weights")
    """Where they are kept; replicas of one host may share it."""
    shared: bool = True
    """Read the announced folder where it is visible. Off: always fetch, e.g. because that volume is slow."""
    timeout_s: Annotated[float, Field(gt=0)] = 3600.0
    """Longest time to fetch one version; what has arrived by then is not fetched again."""


class RolloutSettings(ListenSettings):
    model_config = SettingsConfigDict(env_prefix="DVP_ROLLOUT__", cli_prog_name="dvp-rollout")

    model: Path
    """Folder of a Hugging Face causal LM: config, tokenizer, safetensors."""
    engine: EngineName = EngineName.TRANSFORMERS
    """What generates: transformers in this process, a SGLang server beside it, or fake for load tests."""
    redis_url: RedisUrl | None = None
    """redis://[user:password@]host:port/0 of the broker, or redis+sentinel://[...@]host:port,host:port/NAME.
    Without it only HTTP is served."""
    run_id: Annotated[str, Field(pattern=RUN_ID)] = "default"
    """The training run whose jobs are taken."""
    replica_id: Annotated[str, Field(pattern=RUN_ID)] = Field(default_factory=_replica_id)
    """Name of this replica, unique within the run. Default: host, process id and a random part."""

    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """What the model computes in."""
    fp32_head: bool = False
    """The LM head computes in float32 all the same, as that of a trainer with model.fp32_head does."""
    device: str = "cpu"
    max_batch: Annotated[int, Field(ge=1, le=4096)] = 32
    """Samples that generate side by side."""
    max_context: Annotated[int, Field(ge=2)] | None = None
    """Tokens of prompt and continuation together. Default: what the model allows."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads of the engine. Default: one per CPU that it may use; SGLang chooses by itself."""
    deterministic: bool = False
    """One job is one batch, so that a seed gives the same bits every time."""
    fixed_shape: ShapeText | None = None
    """ROWSxLENGTH: one full forward of this shape per token, so that a trainer with the same shape gets the same bits.
    Slow; for the engine transformers."""

    fake: FakeSettings = FakeSettings()
    sglang: SglangSettings = SglangSettings()
    weights: WeightSettings = WeightSettings()

    max_requests: Annotated[int, Field(ge=1)] = MAX_REQUESTS
    """HTTP requests that are answered at the same time; more get 429."""
    max_waiting: Annotated[int, Field(ge=0)] = 128
    """Samples of HTTP requests that may wait before they get 429."""
    client_share: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Share of max_batch for jobs and HTTP requests of clients while a trainer holds the run; at least one sample."""
    max_queued: Annotated[int, Field(ge=1)] = 1000
    """Jobs of clients that may wait unread in the queue before POST /v1/jobs answers 429."""
    lease_s: Annotated[float, Field(ge=0.5, le=3600)] = 60.0
    """A job whose replica was silent for so long goes to another one."""
    max_deliveries: Annotated[int, Field(ge=1, le=100)] = 3
    """Engine errors and unclean deaths after which a job is a dead letter."""
    job_timeout_s: Annotated[float, Field(gt=0)] = 3600.0
    """Longest time for one job, waiting for its weights included; of a client's job, for each part that generates."""
    trace_url: TraceUrl | None = None
    """Collector of OpenTelemetry traces, e.g. http://127.0.0.1:4318; needs the extra otel."""
    drain_s: Annotated[float, Field(ge=0, le=3600)] = 3.0
    """At SIGTERM: how long jobs may still finish before they are given back."""
