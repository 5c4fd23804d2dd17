"""Jobs: their fields, limits, states and ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import msgpack
from pydantic import AfterValidator, Field, model_validator

from .arrays import Int32Array
from .record import Record
from .sampling import Sampling
from .weights import RUN_ID

MAX_SAMPLES = 1024
MAX_GROUP_TOKENS = 4 * 1024 * 1024
"""Most tokens of all samples of one job: 64 MiB as a group, while Redis allows 512 MiB per value."""
MAX_METADATA_BYTES = 16 * 1024
MAX_METADATA_DEPTH = 32
MAX_TASK_BYTES = 1024 * 1024
BYTES_PER_TOKEN = 16
"""Size of one token in a msgpack group: id, log-prob, kept mass, kept count."""
OVERHEAD_BYTES = 1024
"""Upper bound of what a sample takes besides its tokens (up to ten weight versions), and a group besides its job."""
MAX_DEADLINE_S = 30 * 86_400
"""Longest deadline of a client's job, in seconds after its submission."""
IDLE_S = 3600.0
"""Default time without a turn or heartbeat after which a session is forgotten, in seconds."""
JOB_ID = r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}$"


def _plain(most: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A function that returns an object if JSON and msgpack can both carry it: finite numbers, 64-bit integers, text
    without lone surrogates, not too deep and at most `most` bytes of JSON. It raises ValueError if not."""

    def check(given: dict[str, Any]) -> dict[str, Any]:
        if _depth(given, MAX_METADATA_DEPTH) > MAX_METADATA_DEPTH:
            raise ValueError(f"at most {MAX_METADATA_DEPTH} levels of lists and objects")
        try:
            size = len(json.dumps(given, allow_nan=False, ensure_ascii=False).encode())
            msgpack.packb(given)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"plain JSON: {error}") from None
        if size > most:
            raise ValueError(f"at most {most} bytes as JSON, not {size}")
        return given

    return check


def _depth(value: Any, most: int) -> int:
    """Nesting depth of lists and objects, counted up to `most` + 1."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else None
    if inner is None or most < 0:
        return 0
    return 1 + max((_depth(item, most - 1) for item in inner), default=0)


Metadata = Annotated[dict[str, Any], AfterValidator(_plain(MAX_METADATA_BYTES))]
"""Opaque JSON that goes with a job and comes back with its group."""
check_task = _plain(MAX_TASK_BYTES)
Task = Annotated[dict[str, Any], AfterValidator(check_task)]
"""What a harness needs to play an episode: JSON that only the trainer and the harness understand."""


class Sink(StrEnum):
    """Who consumes the group. Only `train` counts against the trainer's admission."""

    TRAIN = "train"
    EVAL = "eval"
    CLIENT = "client"


class JobState(StrEnum):
    """How far a job is."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    DEAD = "dead"


class Job(Record):
    """One prompt, n samples; or one task, n episodes, which a harness plays in sessions. Ends exactly once: as a Group
    or a dead letter or, if a client's, cancelled or overdue."""

    job_id: Annotated[str, Field(pattern=JOB_ID)]
    run_id: Annotated[str, Field(pattern=RUN_ID)]
    prompt_ids: Int32Array
    """Empty if there is a task: the harness writes the prompts."""
    task: Task | None = None
    idle_s: Annotated[float, Field(gt=0, le=MAX_DEADLINE_S)] = IDLE_S
    """Seconds without a turn or heartbeat after which an episode is given to another harness."""
    chat_template_kwargs: Metadata = Field(default_factory=dict)
    """Arguments of the chat template in the episodes' turns."""
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    sampling: Sampling = Sampling()
    sink: Sink
    metadata: Metadata = Field(default_factory=dict)
    min_seq: Annotated[int, Field(ge=0)] = 0
    """Oldest weight seq that may sample it. A replica that serves an older one loads a newer one first."""
    deadline: float | None = None
    """Unix time in seconds after which the result is not wanted."""
    submitted_at: float = 0.0

    @property
    def max_bytes(self) -> int:
        """Most bytes that the broker holds for this job: first the job itself, then its group of plain completions."""
        sample = BYTES_PER_TOKEN * self.sampling.max_tokens + OVERHEAD_BYTES
        return len(self.to_bytes()) + OVERHEAD_BYTES + self.n * sample

    @property
    def task_digest(self) -> str:
        """Tells the episodes of this task from those of another; "" without a task."""
        if self.task is None:
            return ""
        return hashlib.blake2b(msgpack.packb([self.task, self.chat_template_kwargs]), digest_size=16).hexdigest()

    @property
    def num_episodes(self) -> int:
        """Number of episodes that a harness has to play; 0 if the replicas sample on their own."""
        return 0 if self.task is None else self.n

    @model_validator(mode="after")
    def _prompted(self) -> Job:
        num = len(self.prompt_ids)
        if self.task is not None and (num or self.sink is Sink.CLIENT):
            raise ValueError(f"a task needs the trainer's job without prompt_ids, got {num} ids, sink {self.sink}")
        if self.task is None and (num == 0 or self.prompt_ids.min() < 0):
            raise ValueError(f"prompt_ids needs at least one token id, all >= 0, got {num}")
        return self

    @model_validator(mode="after")
    def _trainable(self) -> Job:
        if self.sink is Sink.TRAIN and self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature is 0: a greedy sample has no importance weight, training needs temperature > 0"
            )
        return self


def own_prefix(run_id: str) -> str:
    """Prefix of the ids of all trainer jobs, and of no client job."""
    return f"{run_id}:"


def job_id(run_id: str, position: int, attempt: int) -> str:
    """The id of a training job: a pure function, so that a resumed trainer submits the same ids again."""
    return f"{own_prefix(run_id)}{position:09d}:{attempt}"


def job_position(job_id: str) -> tuple[int, int]:
    """(data position, attempt) of an id that `job_id` made; sorts in data order."""
    try:
        _, position, attempt = job_id.rsplit(":", 2)
        return int(position), int(attempt)
    except ValueError:
        raise ValueError(f"job id {job_id!r}: expected run_id:position:attempt") from None
