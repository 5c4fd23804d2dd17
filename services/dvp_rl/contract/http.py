"""Request and response bodies of the HTTP API."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .group import EngineFacts, EnvironmentSpan, FinishReason, Sample, VersionSpan
from .job import IDLE_S, JOB_ID, MAX_DEADLINE_S, MAX_SAMPLES, JobState, Metadata, Sink
from .metrics import Metrics
from .sampling import MAX_NEW_TOKENS, MAX_SEED, MAX_STOP_TOKENS, MIN_P, Sampling, Stops, log_of
from .session import Ending, SessionState

MAX_PROMPT_CHARS = 4_000_000
MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_FIELDS = 64
MAX_EPISODE_WAIT_S = 60.0

# "5" or true among the numbers of a list is an error.
TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Counts = Annotated[list[Annotated[int, Field(strict=True, ge=1, lt=2**31)]], Field(fail_fast=True)]
Numbers = Annotated[list[Annotated[float, Field(strict=True)]], Field(fail_fast=True)]


def example(**values: Any) -> ConfigDict:
    """An example of a body for the OpenAPI document, as the model's `model_config`."""
    return ConfigDict(json_schema_extra={"examples": [values]})


class Body(BaseModel):
    """Every field has a description, which the OpenAPI document shows."""

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
    """Tokens less likely than min_p times the most likely one are never drawn. The default is e^-13."""
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    """0 is greedy: the most likely token, with log-prob 0 and kept mass 1. Such samples have no importance weight."""
    max_tokens: Annotated[int, Field(ge=1, le=MAX_NEW_TOKENS)] = 256
    """Most tokens of one sample. Less if the model's context ends before."""
    stop: Stops = ()
    """Strings that end a sample. Their tokens stay in token_ids; the text is cut before them."""
    stop_token_ids: Annotated[tuple[TokenId, ...], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] = ()
    """Token ids that end a sample, besides the model's end of sequence."""
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    """Sample i is a function of (seed, i), and of how the engine computes. null: the job's id gives the seed."""
    top_p: Annotated[float, Field(ge=1, le=1)] = 1.0
    """Only 1: nothing but min-p may prune, or the log-probs would not be the sampler's."""
    top_k: None = None
    """Only null, for the same reason."""

    def to_sampling(self) -> Sampling:
        return Sampling(log_min_p=log_of(self.min_p), **self.model_dump(exclude={"min_p", "top_p", "top_k"}))


class Message(Body):
    """One turn of a conversation."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    """Who speaks, as the model's chat template names it: usually system, user or assistant."""
    content: Annotated[str, Field(max_length=MAX_PROMPT_CHARS)]
    """What is said."""


class RolloutRequest(Body):
    """Exactly one of prompt_ids, prompt and messages."""

    prompt_ids: Annotated[list[TokenId], Field(min_length=1, fail_fast=True)] | None = None
    """The prompt as token ids, taken as they are."""
    prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARS)] | None = None
    """The prompt as text. The tokenizer adds its special tokens."""
    messages: Annotated[list[Message], Field(min_length=1, max_length=1024, fail_fast=True)] | None = None
    """The prompt as a conversation, rendered by the model's chat template."""
    chat_template_kwargs: Metadata = Field(default_factory=dict)
    """Arguments of the model's chat template besides the messages, e.g. {"enable_thinking": false}. Limits as for
    metadata."""
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    """Number of samples."""
    sampling: SamplingBody = SamplingBody()
    """How tokens are drawn, and when a sample ends."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Anything in JSON, returned with the samples: at most 16 KiB, 32 levels deep, integers of 64 bits."""
    return_text: bool = True
    """Whether samples come with their decoded text."""

    @model_validator(mode="after")
    def _one_prompt(self) -> RolloutRequest:
        given = [name for name in ("prompt_ids", "prompt", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of prompt_ids, prompt and messages, got {given or 'none'}")
        if self.chat_template_kwargs and self.messages is None:
            raise ValueError(f"chat_template_kwargs are for messages, got {given[0]}")
        return self


class JobRequest(RolloutRequest):
    """A rollout to be queued: exactly one of prompt_ids, prompt and messages."""

    job_id: Annotated[str, Field(pattern=JOB_ID)] | None = None
    """Submitting the same id again is a no-op, but another caller's id is refused. Ids that begin with the run's id and
    a colon are reserved for the trainer."""
    deadline_s: Annotated[float, Field(gt=0, le=MAX_DEADLINE_S)] | None = None
    """Seconds after its submission within which the job must be done. A late job becomes dead, whether it waits or
    runs, and leaves no dead letter to replay."""


class SampleBody(Body):
    """One continuation of T tokens. The model drew M >= 1 of them: all, unless `environment` is not empty."""

    token_ids: TokenIds
    """int32[T]. Ids, including a final end-of-sequence token and every token of a stop string."""
    logprobs: Numbers
    """float32[M]. Natural log-probability of each drawn token under the constrained policy: renormalised over the safe
    set."""
    kept_mass: Numbers
    """float32[M]. Probability, in (0, 1], that the unconstrained policy gives to the safe set at each position."""
    kept_count: Counts
    """int32[M]. Number of tokens in the safe set at each position."""
    finish_reason: FinishReason
    """stop: at an end-of-sequence token, stop token or stop string. length: at max_tokens or the end of the
    context."""
    versions: Annotated[tuple[VersionSpan, ...], Field(fail_fast=True)]
    """Which weights drew which tokens: several if weights were swapped meanwhile."""
    environment: Annotated[tuple[EnvironmentSpan, ...], Field(fail_fast=True)] = ()
    """Which tokens the model did not draw, but read from its environment in between."""
    prompt_ids: TokenIds | None = None
    """What the sample continues; null if it is the prompt of the answer."""
    seed: int
    """Seed of this sample's own random stream: up to 2^63 - 1, more than a number of JavaScript holds exactly."""
    text: str | None = None
    """Decoded text without special tokens, cut before a stop string if `environment` is empty. null if return_text is
    false."""

    @classmethod
    def of(cls, sample: Sample, text: str | None) -> SampleBody:
        return cls(**sample.model_dump(mode="json"), text=text)


ANSWERED: dict[str, Any] = {
    "job_id": "4a836d7537b44a06a29652e552a6f385",
    "run_id": "default",
    "prompt_ids": [22, 26, 14, 24, 27, 32],
    "engine": {
        "name": "transformers",
        "version": "5.19.0",
        "dtype": "float32",
        "fp32_head": False,
        "logprob_kind": "constrained",
    },
    "metadata": {"row": 7},
    "samples": [
        {
            "token_ids": [27, 24, 1],
            "logprobs": [-1.621987223625183, -0.4696982800960541, 0.0],
            "kept_mass": [0.928727388381958, 0.9431865215301514, 0.9999600648880005],
            "kept_count": [3, 4, 1],
            "finish_reason": "stop",
            "versions": [{"version": "default:0:26c3b9c3533dd897", "start": 0, "end": 3}],
            "environment": [],
            "prompt_ids": None,
            "seed": 1,
            "text": "85",
        }
    ],
}
"""What the demo's model, untrained, answered once."""


class RolloutResponse(Body):
    """The samples of one prompt, and what drew them."""

    model_config = example(**ANSWERED)

    job_id: str
    """Id of the job; of a rollout, one made up by the replica."""
    run_id: str
    """The training run that the replica belongs to."""
    prompt_ids: TokenIds
    """int32[P]. The prompt as the model saw it."""
    engine: EngineFacts
    """The engine that drew the samples."""
    samples: Annotated[tuple[SampleBody, ...], Field(fail_fast=True)]
    """All n samples, in order of their streams."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """The request's metadata, unchanged."""


class JobAccepted(Body):
    """The job is in the queue."""

    model_config = example(job_id="37+58-row-7")

    job_id: str
    """Id under which GET /v1/jobs/{job_id} finds it."""


class JobStatus(Body):
    """How far a job is, and its samples once it is done."""

    model_config = example(status="done", error=None, group=ANSWERED | {"job_id": "37+58-row-7"})

    status: JobState
    """queued: no replica has taken it. running: a replica generates. done: `group` holds the samples. dead: it was
    given up, `error` says why."""
    group: RolloutResponse | None = None
    """The samples of a client's job that is done; else null."""
    error: str | None = None
    """Why the job is dead; null if it is not."""


class SessionRequest(Body):
    """A session to be opened."""

    session_id: Annotated[str, Field(pattern=JOB_ID)] | None = None
    """Opening the same id again with the same settings is a no-op. Default: a random one."""
    sampling: SamplingBody = SamplingBody()
    """The policy of all turns, and the limits of those that name none."""
    chat_template_kwargs: Metadata = Field(default_factory=dict)
    """Arguments of the model's chat template besides messages and tools, e.g. {"enable_thinking": false}."""
    metadata: Metadata = Field(default_factory=dict)
    """Anything in JSON, returned with the session: at most 16 KiB, 32 levels deep, integers of 64 bits."""
    idle_s: Annotated[float, Field(gt=0, le=MAX_DEADLINE_S)] = IDLE_S
    """Seconds without a turn or heartbeat after which the session is forgotten."""


class FinishRequest(Body):
    """The end of an episode."""

    model_config = example(reward=1.0, metrics={"tool_errors": 1})

    reward: Annotated[float, Field(strict=True)] | None = None
    """What the episode earned; null if nobody knows yet. The trainer's reward function then scores its own episodes."""
    truncated: bool = False
    """Whether the episode was cut off: by the context, a number of turns, or a time limit. The trainer then treats it
    like a sample that max_tokens cut off (reward.overlong)."""
    metrics: Metrics = Field(default_factory=dict)
    """What was counted in the episode: up to 16 numbers by name. The trainer reports their means over the episodes that
    have them, as episodes/NAME_mean. The replica itself counts turns, forks and drifted turns."""

    def to_ending(self) -> Ending:
        return Ending(**self.model_dump())


class EpisodeRequest(Body):
    """An episode to be taken."""

    model_config = example(wait_s=20)

    wait_s: Annotated[float, Field(ge=0, le=MAX_EPISODE_WAIT_S)] = 20.0
    """Longest wait for an episode, in seconds; then the answer is empty (204)."""


class EpisodeBody(Body):
    """An episode of a training run, for the caller to play in a session. Finish it with a reward, or delete it."""

    model_config = example(
        session_id="0f6bb5c68d9d4e0f",
        run_id="demo",
        job_id="demo:000000007:0",
        index=0,
        n=8,
        sink="train",
        task={"row": 7, "prompt": "What is 37+58?", "answer": "95", "columns": {}},
        sampling={"log_min_p": -13.0, "temperature": 1.0, "max_tokens": 64, "stop": [], "stop_token_ids": []},
        idle_s=120.0,
    )

    session_id: str
    """Its OpenAI endpoint is /v1/sessions/{session_id}/v1."""
    run_id: str
    """The training run: the name of the endpoint's model."""
    job_id: str
    """The job whose n episodes make a group."""
    index: int
    """Which of them this is, from 0."""
    n: int
    """Number of episodes of the job. Others may be played at the same time, by anyone."""
    sink: Sink
    """train: the trainer learns from it. eval: it measures a held-out score."""
    task: dict[str, Any]
    """The row of the data set: its number (row), prompt (text or messages), answer, and all other columns."""
    sampling: dict[str, Any]
    """The policy of all turns, and the limits of those that name none."""
    idle_s: float
    """Seconds without a turn or heartbeat after which the episode is given to another caller."""


class SessionBody(Body):
    """How far a session is, and its samples once it is finished."""

    model_config = example(
        session_id="37+58-row-7",
        state="finished",
        turns=1,
        branches=1,
        drifted=0,
        tokens=9,
        reward=1.0,
        metrics={"tool_errors": 1},
        metadata={"row": 7},
        group=ANSWERED | {"job_id": "37+58-row-7"},
    )

    session_id: str
    """Its OpenAI endpoint is /v1/sessions/{session_id}/v1."""
    state: SessionState
    """open: it takes turns. finished: it takes none."""
    turns: int = 0
    """Number of turns."""
    branches: int = 0
    """Number of samples that the turns make: 1 as long as no turn opened another branch."""
    drifted: int = 0
    """Turns that opened a branch although the client sent the recorded answer, because the chat template renders it as
    another text than was drawn."""
    tokens: int = 0
    """Tokens recorded, each once: drawn ones and those of prompts, tools and users."""
    reward: float | None = None
    """What the client gave; null if it gave none."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """What the client counted."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """The metadata it was opened with."""
    group: RolloutResponse | None = None
    """In the answer of /finish the episode: one sample per branch. Else null."""


class WeightStatus(Body):
    """The version served, the one being loaded, and why the newest one could not be loaded."""

    model_config = example(
        version="qwen3-math:12:26c3b9c3533dd897", loading="qwen3-math:13:0f6e8d6d2a9b4c11", error=None
    )

    version: str
    """run_id:seq:digest of the weights served; seq 0 is the model folder that the replica was started with."""
    loading: str | None = None
    """The version being loaded; null if none is."""
    error: str | None = None
    """Why the newest version could not be loaded, or does not work; null if nothing failed."""
    wrong: str | None = None
    """How the engine differs from the trainer under the weights served; null if it passed their canary. The replica
    takes no work meanwhile."""


class FieldError(Body):
    """One field of a request that breaks the contract."""

    field: str
    """Path of the field, e.g. sampling.min_p."""
    value: Any = None
    """What was sent, shortened; null if it is missing, or null, or JSON cannot express it."""
    allowed: str
    """What would be accepted."""


class Problem(Body):
    """RFC 9457 problem details, `application/problem+json`."""

    type: str = "about:blank"
    """Always about:blank: title and status say what kind of problem it is."""
    title: str
    """What kind of problem this is, the same for every one of its kind."""
    status: int
    """The HTTP status."""
    detail: str
    """What was wrong here, and what to do."""
    errors: tuple[FieldError, ...] = ()
    """The fields that are wrong, at most 16; empty if the problem is not about fields."""


class StreamHealth(Body):
    """One stream of the queue."""

    backlog: int
    """Entries no consumer has read: XLEN minus pending."""
    pending: int
    """Entries read and not yet acknowledged."""
    oldest_age_s: float | None
    """Age of the oldest entry; null when there is none."""
    redelivered: int
    """How often entries were given to another reader, because theirs died or failed."""


class EpisodeHealth(StreamHealth):
    """The episodes that harnesses have to play."""

    backlog: int
    """Episodes that wait for a harness."""
    pending: int
    """Episodes that a harness plays."""
    oldest_age_s: float | None
    """Longest time that one has waited for a harness; null when none waits."""
    redelivered: int
    """How often episodes were given to another harness, because theirs died, was silent or failed."""
    silent_s: float | None
    """Longest time for which a played one has had no turn or heartbeat, if all have the same idle_s; null when none is
    played."""


class ReplicaState(StrEnum):
    """What a replica does. lost: its heartbeats ended without a goodbye."""

    STARTING = "starting"
    SERVING = "serving"
    LOADING = "loading"
    DRAINING = "draining"
    LOST = "lost"


class ReplicaHealth(Body):
    """One replica, as its last heartbeat told."""

    id: str
    """Its replica_id."""
    state: ReplicaState
    """What it does."""
    version: str
    """run_id:seq:digest of the weights that it serves."""
    in_flight: int
    """Samples that generate or wait there."""
    last_seen_s: float
    """Seconds since its last heartbeat."""
    up_s: float | None = None
    """Seconds since its first heartbeat; null if its version does not report that."""
    wrong: str = ""
    """How its engine differs from the trainer under the same weights; "" if it is not known to."""


class TrainerHealth(Body):
    """The run's trainer, as its last heartbeat told."""

    step: int
    """Its last finished step."""
    version: str
    """run_id:seq:digest of the weights that it announced last."""
    last_seen_s: float
    """Seconds since its last heartbeat."""


class Verdict(StrEnum):
    """The state of the queue in one word. `reasons` say what was seen, and what to do."""

    OK = "ok"
    IDLE = "idle"
    NO_REPLICAS = "no_replicas"
    NO_TRAINER = "no_trainer"
    NO_HARNESS = "no_harness"
    WRONG_WEIGHTS = "wrong_weights"
    REPLICAS_BEHIND = "replicas_behind"
    STALLED = "stalled"
    REWARDS_SLOW = "rewards_slow"
    HARNESSES_SLOW = "harnesses_slow"
    TRAINER_STARVED = "trainer_starved"
    REPLICAS_STARVED = "replicas_starved"
    EPISODES_SILENT = "episodes_silent"
    DEAD_LETTERS = "dead_letters"
    BROKER_MEMORY = "broker_memory"
    BROKER_DISK = "broker_disk"
    CLOSED = "closed"
    REPLICAS_LOST = "replicas_lost"
    CLIENTS_WAIT = "clients_wait"
    GROWING_BACKLOG = "growing_backlog"


class Severity(StrEnum):
    """critical: nothing gets done until somebody acts."""

    CRITICAL = "critical"
    WARNING = "warning"
    INFO = "info"


class Reason(Body):
    """One rule that fired: what was seen, and what to do."""

    verdict: Verdict
    """The rule."""
    severity: Severity
    """How urgent it is."""
    detail: str
    """What was seen, with numbers."""
    remedy: str
    """What to do."""


class QueueHealth(Body):
    """Everything about one run's queue at one moment."""

    model_config = example(
        run_id="qwen3-math",
        jobs={"backlog": 4, "pending": 12, "oldest_age_s": 3.2, "redelivered": 6},
        client_jobs={"backlog": 0, "pending": 1, "oldest_age_s": 0.8, "redelivered": 0},
        episodes={"backlog": 3, "pending": 16, "oldest_age_s": 2.4, "redelivered": 1, "silent_s": 6.0},
        client_sessions=2,
        groups={"backlog": 1, "pending": 7, "oldest_age_s": 5.1, "redelivered": 0},
        uncheckpointed=24,
        dead=2,
        duplicates=0,
        in_flight=24,
        replicas=[
            {
                "id": "replica-1",
                "state": "serving",
                "version": "qwen3-math:12:26c3b9c3533dd897",
                "in_flight": 96,
                "last_seen_s": 0.4,
                "up_s": 512.0,
            }
        ],
        trainer={"step": 12, "version": "qwen3-math:12:26c3b9c3533dd897", "last_seen_s": 0.9},
        verdict="dead_letters",
        reasons=[
            {
                "verdict": "dead_letters",
                "severity": "warning",
                "detail": "2 jobs were given up",
                "remedy": "read their errors and which can be replayed (dvp-queue dead list), fix the cause, then "
                "replay or drop them",
            }
        ],
    )

    run_id: str
    """The training run."""
    jobs: StreamHealth
    """Stream of the trainer's jobs."""
    client_jobs: StreamHealth = StreamHealth(backlog=0, pending=0, oldest_age_s=None, redelivered=0)
    """Stream of clients' jobs. Older replicas count them in `jobs`."""
    episodes: EpisodeHealth | None = None
    """Episodes of the trainer's jobs; null if the run never had any."""
    client_sessions: int = 0
    """Clients' sessions that are open."""
    groups: StreamHealth
    """Stream of finished groups, which the trainer reads."""
    uncheckpointed: int
    """Jobs trained or dropped since the last checkpoint; their groups are kept until the next one."""
    dead: int
    """Dead letters."""
    duplicates: int
    """Entries discarded because their job had already ended, e.g. results of a replica that was believed lost."""
    in_flight: int
    """Jobs of the trainer that it has submitted and neither trained nor dropped, and that are not dead."""
    replicas: tuple[ReplicaHealth, ...]
    """Replicas that serve this run, and those lost lately."""
    trainer: TrainerHealth | None
    """null if no trainer was ever seen."""
    verdict: Verdict
    """The most urgent rule that applies; ok if none does."""
    reasons: tuple[Reason, ...]
    """All rules that apply, the most urgent first."""


class Health(Body):
    """Whether this process can do its work."""

    model_config = example(status="ok", detail="")

    status: Literal["ok", "unavailable"]
    """unavailable comes with status 503."""
    detail: str = ""
    """What is missing; empty if nothing is."""
