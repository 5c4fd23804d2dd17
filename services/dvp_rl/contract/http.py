"""Request and response bodies of the HTTP API."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .arrays import Float32Array, Int32Array
from .group import EngineFacts, FinishReason, Sample, VersionSpan
from .job import JOB_ID, MAX_DEADLINE_S, MAX_SAMPLES, JobState, Metadata
from .sampling import LOG_RHO, MAX_SEED, MIN_P, Sampling

MAX_PROMPT_CHARS = 4_000_000
MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_FIELDS = 64


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, data: Any) -> Any:
        # One error per unknown field would turn a body full of them into gigabytes of errors.
        if isinstance(data, dict) and len(data) > MAX_FIELDS:
            raise ValueError(f"{len(data)} fields; known: {', '.join(cls.model_fields)}")
        return data


class SamplingBody(Body):
    """Sampling settings, with min_p instead of its logarithm. top_p and top_k exist to be refused with a reason."""

    min_p: Annotated[float, Field(gt=0, le=1)] = MIN_P
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    """0 is greedy: the most likely token, with log-prob 0 and kept mass 1. Such samples have no importance weight."""
    max_tokens: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256)], ...], Field(max_length=16, fail_fast=True)
    ] = ()
    stop_token_ids: Annotated[
        tuple[Annotated[int, Field(ge=0, lt=2**31)], ...], Field(max_length=64, fail_fast=True)
    ] = ()
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    top_p: Annotated[float, Field(ge=1, le=1)] = 1.0
    """Only 1: nothing but min-p may prune, or the log-probs would not be the sampler's."""
    top_k: None = None
    """Only null, for the same reason."""

    def to_sampling(self) -> Sampling:
        # The documented default is exp(-13) in float64, whose log is not exactly -13; the wire carries exactly -13.
        log_min_p = LOG_RHO if self.min_p == MIN_P else math.log(self.min_p)
        return Sampling(log_min_p=log_min_p, **self.model_dump(exclude={"min_p", "top_p", "top_k"}))


class Message(Body):
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[str, Field(max_length=MAX_PROMPT_CHARS)]


class RolloutRequest(Body):
    """Exactly one of prompt_ids, prompt and messages."""

    prompt_ids: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)] | None = (
        None
    )
    prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARS)] | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=1024, fail_fast=True)] | None = None
    chat_template_kwargs: Metadata = Field(default_factory=dict)
    """Arguments of the model's chat template besides the messages, e.g. {"enable_thinking": false}."""
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    sampling: SamplingBody = SamplingBody()
    metadata: dict[str, Any] = Field(default_factory=dict)
    return_text: bool = True

    @model_validator(mode="after")
    def _one_prompt(self) -> RolloutRequest:
        given = [name for name in ("prompt_ids", "prompt", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of prompt_ids, prompt and messages, got {given or 'none'}")
        if self.chat_template_kwargs and self.messages is None:
            raise ValueError(f"chat_template_kwargs are for messages, got {given[0]}")
        return self


class JobRequest(RolloutRequest):
    job_id: Annotated[str, Field(pattern=JOB_ID)] | None = None
    """Submitting the same id again is a no-op. Ids that begin with the run's id and a colon are reserved for the
    trainer."""
    deadline_s: Annotated[float, Field(gt=0, le=MAX_DEADLINE_S)] | None = None
    """Seconds after its submission within which the job must be done. A late job becomes dead, whether it waits or
    runs, and leaves no dead letter to replay."""


class SampleBody(Body):
    token_ids: Int32Array
    logprobs: Float32Array
    kept_mass: Float32Array
    kept_count: Int32Array
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]
    seed: int
    text: str | None = None
    """Decoded text without special tokens, cut before a stop string. null if return_text is false."""

    @classmethod
    def of(cls, sample: Sample, text: str | None) -> SampleBody:
        return cls(**{name: getattr(sample, name) for name in type(sample).model_fields}, text=text)


class RolloutResponse(Body):
    job_id: str
    run_id: str
    prompt_ids: Int32Array
    engine: EngineFacts
    samples: tuple[SampleBody, ...]
    metadata: dict[str, Any] = Field(default_factory=dict)


class JobAccepted(Body):
    job_id: str


class JobStatus(Body):
    status: JobState
    group: RolloutResponse | None = None
    error: str | None = None


class WeightStatus(Body):
    """The version served, the one being loaded, and why the newest one could not be loaded."""

    version: str
    loading: str | None = None
    error: str | None = None


class FieldError(Body):
    field: str
    value: Any = None
    allowed: str


class Problem(Body):
    """RFC 9457 problem details, `application/problem+json`."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    errors: tuple[FieldError, ...] = ()


class StreamHealth(Body):
    backlog: int
    """Entries no consumer has read: XLEN minus pending."""
    pending: int
    """Entries read and not yet acknowledged."""
    oldest_age_s: float | None
    """Age of the oldest entry; null when there is none."""
    redelivered: int


class ReplicaState(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    LOADING = "loading"
    DRAINING = "draining"
    LOST = "lost"


class ReplicaHealth(Body):
    id: str
    state: ReplicaState
    version: str
    in_flight: int
    last_seen_s: float
    up_s: float | None = None
    """Seconds since its first heartbeat; null if its version does not report that."""


class TrainerHealth(Body):
    step: int
    version: str
    last_seen_s: float


class Verdict(StrEnum):
    OK = "ok"
    IDLE = "idle"
    NO_REPLICAS = "no_replicas"
    NO_TRAINER = "no_trainer"
    REPLICAS_BEHIND = "replicas_behind"
    STALLED = "stalled"
    REWARDS_SLOW = "rewards_slow"
    TRAINER_STARVED = "trainer_starved"
    REPLICAS_STARVED = "replicas_starved"
    DEAD_LETTERS = "dead_letters"
    BROKER_MEMORY = "broker_memory"
    BROKER_DISK = "broker_disk"
    CLOSED = "closed"
    REPLICAS_LOST = "replicas_lost"
    CLIENTS_WAIT = "clients_wait"
    GROWING_BACKLOG = "growing_backlog"


class Severity(StrEnum):
    CRITICAL = "critical"
    """Nothing gets done until somebody acts."""
    WARNING = "warning"
    INFO = "info"


class Reason(Body):
    """One rule that fired: what was seen, and what to do."""

    verdict: Verdict
    severity: Severity
    detail: str
    remedy: str


class QueueHealth(Body):
    run_id: str
    jobs: StreamHealth
    """Stream of the trainer's jobs."""
    client_jobs: StreamHealth = StreamHealth(backlog=0, pending=0, oldest_age_s=None, redelivered=0)
    """Stream of clients' jobs. Older replicas count them in `jobs`."""
    groups: StreamHealth
    uncheckpointed: int
    dead: int
    duplicates: int
    in_flight: int
    replicas: tuple[ReplicaHealth, ...]
    trainer: TrainerHealth | None
    verdict: Verdict
    reasons: tuple[Reason, ...]


class Health(Body):
    status: Literal["ok", "unavailable"]
    detail: str = ""
