"""What a replica returns for a job."""

from __future__ import annotations

from enum import StrEnum
from itertools import pairwise
from typing import Annotated

from pydantic import Field, model_validator

from .arrays import Float32Array, Int32Array
from .job import Metadata, Sink
from .record import Record
from .sampling import MAX_SEED, Sampling


class FinishReason(StrEnum):
    """Why a sample ended."""

    STOP = "stop"
    """The sample ended with an end-of-sequence token, a stop token or a stop string, which token_ids includes."""
    LENGTH = "length"
    """max_tokens or the context length was reached."""


class LogprobKind(StrEnum):
    """What log-probabilities are renormalised over."""

    CONSTRAINED = "constrained"
    """log pi_mp: renormalised over the safe set."""
    FULL = "full"
    """log softmax(z / T): what stock engines return. Never trained on."""


class VersionSpan(Record):
    """token_ids[start:end] were drawn from these weights."""

    version: str
    """run_id:seq:digest of the weights."""
    start: Annotated[int, Field(ge=0)]
    """Index of the first token."""
    end: Annotated[int, Field(ge=0)]
    """Index after the last token."""


class EngineFacts(Record):
    """The engine that generated a group, and how it computed."""

    name: str
    """E.g. transformers, or sglang."""
    version: str
    """The version of that library."""
    dtype: str
    """Number format in which the model computes."""
    fp32_head: bool = False
    """The LM head computes in float32, whatever `dtype` is."""
    logprob_kind: LogprobKind = LogprobKind.CONSTRAINED
    """constrained: renormalised over the safe set. full: over the whole vocabulary, which is never trained on."""


class Sample(Record):
    """One finished continuation of T >= 1 tokens. All arrays have length T."""

    token_ids: Int32Array
    """Sampled ids, including a final end-of-sequence token and every token of a stop string."""
    logprobs: Float32Array
    """Natural log pi_infer_mp(token_ids[t]) under the replica's own safe set."""
    kept_mass: Float32Array
    """Z_t in (0, 1]: full-softmax probability (at the job's temperature) of the safe set."""
    kept_count: Int32Array
    """Size of the safe set, >= 1."""
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]
    """Contiguous, covering [0, T)."""
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)]

    @model_validator(mode="after")
    def _consistent(self) -> Sample:
        T = len(self.token_ids)
        lengths = {name: len(getattr(self, name)) for name in ("logprobs", "kept_mass", "kept_count")}
        if T == 0 or any(length != T for length in lengths.values()):
            raise ValueError(f"arrays must share one length >= 1: token_ids {T}, {lengths}")
        edges = [0, *(span.end for span in self.versions)]
        starts = [span.start for span in self.versions]
        if starts != edges[:-1] or edges[-1] != T or any(a >= b for a, b in pairwise(edges)):
            raise ValueError(f"version spans must cover [0, {T}) without gaps, got starts {starts}, ends {edges[1:]}")
        if self.token_ids.min() < 0:
            raise ValueError(f"token ids must be >= 0, got {self.token_ids.min()}")
        if self.logprobs.max() > 1e-5:
            raise ValueError(f"log-probs must be <= 0, got {self.logprobs.max()}")
        if self.kept_count.min() < 1:
            raise ValueError(f"kept_count must be >= 1, got {self.kept_count.min()}")
        if self.kept_mass.min() <= 0 or self.kept_mass.max() > 1 + 1e-4:
            raise ValueError(f"kept_mass must lie in (0, 1], got {self.kept_mass.min()}..{self.kept_mass.max()}")
        return self


class Group(Record):
    """Exactly the n finished samples of one job. Aborted samples are never included."""

    job_id: str
    run_id: str
    prompt_ids: Int32Array
    sampling: Sampling
    samples: Annotated[tuple[Sample, ...], Field(min_length=1)]
    sink: Sink
    replica_id: str
    engine: EngineFacts
    metadata: Metadata = Field(default_factory=dict)
    generate_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds from the request to the engine to the last token; for a client's job, waits for slots included."""
    finished_at: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)


class DeadLetter(Record):
    """A job that will never become a group. Its tombstone on the groups stream tells the trainer that it has ended."""

    job_id: str
    run_id: str
    sink: Sink
    error: str
    deliveries: int
    replica_id: str
    died_at: float
