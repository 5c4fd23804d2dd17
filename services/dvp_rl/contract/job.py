"""A prompt to sample from, and what becomes of it."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any

import msgpack
from pydantic import AfterValidator, Field, field_validator, model_validator

from .arrays import Int32Array
from .record import Record
from .sampling import Sampling
from .weights import RUN_ID

MAX_SAMPLES = 1024
MAX_GROUP_TOKENS = 4 * 1024 * 1024
"""Tokens that the samples of one job may have together: 64 MiB as a group, where Redis takes 512 MiB as one value."""
MAX_METADATA_BYTES = 16 * 1024
MAX_METADATA_DEPTH = 32
BYTES_PER_TOKEN = 16
"""Of a group, as msgpack: id, log-prob, kept mass, kept count."""
OVERHEAD_BYTES = 1024
"""More than a sample takes beside its tokens (up to ten weight versions), and a group beside its job."""
MAX_DEADLINE_S = 30 * 86_400
"""From the submission of a client's job."""
JOB_ID = r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}$"


def _plain(metadata: dict[str, Any]) -> dict[str, Any]:
    """What JSON and msgpack both carry: finite, integers of 64 bits, text without lone surrogates, not too deep."""
    if _depth(metadata, MAX_METADATA_DEPTH) > MAX_METADATA_DEPTH:
        raise ValueError(f"nested deeper than {MAX_METADATA_DEPTH} levels")
    try:
        size = len(json.dumps(metadata, allow_nan=False, ensure_ascii=False).encode())
        msgpack.packb(metadata)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"must be plain JSON: {error}") from None
    if size > MAX_METADATA_BYTES:
        raise ValueError(f"{size} bytes as JSON, at most {MAX_METADATA_BYTES} allowed")
    return metadata


def _depth(value: Any, most: int) -> int:
    """Levels of lists and objects; looks no deeper than `most` and one more."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else None
    if inner is None or most < 0:
        return 0
    return 1 + max((_depth(item, most - 1) for item in inner), default=0)


Metadata = Annotated[dict[str, Any], AfterValidator(_plain)]
"""Opaque JSON that goes with a job and comes back with its group."""


class Sink(StrEnum):
    """Who consumes the group. Only `train` counts against the trainer's admission."""

    TRAIN = "train"
    EVAL = "eval"
    CLIENT = "client"


class JobState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    DEAD = "dead"


class Job(Record):
    """One prompt, n samples. Ends exactly once: as a Group or as a dead letter."""

    job_id: Annotated[str, Field(pattern=JOB_ID)]
    run_id: Annotated[str, Field(pattern=RUN_ID)]
    prompt_ids: Int32Array
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    sampling: Sampling = Sampling()
    sink: Sink
    metadata: Metadata = Field(default_factory=dict)
    min_seq: Annotated[int, Field(ge=0)] = 0
    """A replica that serves an older weight version loads a newer one before it starts."""
    deadline: float | None = None
    """Unix seconds after which nobody wants the result."""
    submitted_at: float = 0.0

    @property
    def max_bytes(self) -> int:
        """What the broker may hold of this job: first itself, then its group."""
        sample = BYTES_PER_TOKEN * self.sampling.max_tokens + OVERHEAD_BYTES
        return len(self.to_bytes()) + OVERHEAD_BYTES + self.n * sample

    @field_validator("prompt_ids")
    @classmethod
    def _prompt(cls, prompt_ids: Int32Array) -> Int32Array:
        if len(prompt_ids) == 0 or prompt_ids.min() < 0:
            raise ValueError(f"needs at least one token id, all >= 0, got {len(prompt_ids)}")
        return prompt_ids

    @model_validator(mode="after")
    def _trainable(self) -> Job:
        if self.sink is Sink.TRAIN and self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature is 0: a greedy sample has no importance weight, training needs temperature > 0"
            )
        return self


def own_prefix(run_id: str) -> str:
    """What the id of every job of the trainer begins with, and of no client's."""
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
