"""What a replica returns for a job."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from .arrays import Float32Array, Int32Array
from .job import Metadata, Sink
from .metrics import COUNTED, MAX_METRICS, Name, Value
from .record import Record
from .sampling import MAX_SEED, Sampling

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


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


class EnvironmentSpan(Record):
    """token_ids[start:end] came from the environment: a tool's answer, a user's turn, marks of the chat template."""

    start: Annotated[int, Field(ge=0)]
    """Index of the first token."""
    end: Annotated[int, Field(ge=0)]
    """Index after the last token."""


class EngineFacts(Record):
    """The engine that generated a group, and how it computed."""

    name: str
    """E.g. transformers, sglang or vllm."""
    version: str
    """The version of that library."""
    dtype: str
    """Number format in which the model computes."""
    fp32_head: bool = False
    """The LM head computes in float32, whatever `dtype` is."""
    logprob_kind: LogprobKind = LogprobKind.CONSTRAINED
    """constrained: renormalised over the safe set. full: over the whole vocabulary, which is never trained on."""


class Sample(Record):
    """One finished continuation of T tokens, of which M >= 1 are model tokens: drawn by the engine, and trained on.

    The other tokens are the environment's. They have no log-prob: the policy reads them and did not choose them. A
    plain completion has none, so that M = T.
    """

    token_ids: Int32Array
    """[T] ids, including a final end-of-sequence token and every token of a stop string."""
    logprobs: Float32Array
    """[M] natural log pi_infer_mp of each model token under the replica's own safe set."""
    kept_mass: Float32Array
    """[M] Z_t in (0, 1]: full-softmax probability (at the job's temperature) of the safe set."""
    kept_count: Int32Array
    """[M] size of the safe set, >= 1."""
    finish_reason: FinishReason
    """Why the last model token was the last."""
    versions: tuple[VersionSpan, ...]
    """Which weights drew which model tokens. With `environment`, these spans cover [0, T) without gap or overlap."""
    environment: tuple[EnvironmentSpan, ...] = ()
    """Always between model tokens: earlier ones belong to the prompt, and later ones were never read."""
    prompt_ids: Int32Array | None = None
    """The sample's own prompt, if it is not the group's: the rewritten history of a fork."""
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)]

    @model_validator(mode="after")
    def _consistent(self) -> Sample:
        T = len(self.token_ids)
        spans: list[VersionSpan | EnvironmentSpan] = [*self.versions, *self.environment]
        spans.sort(key=lambda span: (span.start, span.end))
        rule, end = f"spans of versions and of the environment must cover [0, {T}) without gap or overlap", 0
        for span in spans:
            if span.start != end or span.end <= end:
                raise ValueError(f"{rule}: [{span.start}, {span.end}) follows token {end}")
            end = span.end
        if T == 0 or end != T:
            raise ValueError(f"{rule}: the last one ends at {end}")
        if any(isinstance(span, EnvironmentSpan) for span in (spans[0], spans[-1])):
            raise ValueError("the first and the last token must be a model's, got an environment's")
        M = sum(span.end - span.start for span in self.versions)
        lengths = {name: len(getattr(self, name)) for name in ("logprobs", "kept_mass", "kept_count")}
        if any(length != M for length in lengths.values()):
            raise ValueError(f"arrays must have one entry for each of the {M} model tokens, got {lengths}")
        if self.token_ids.min() < 0:
            raise ValueError(f"token ids must be >= 0, got {self.token_ids.min()}")
        if self.prompt_ids is not None and (len(self.prompt_ids) == 0 or self.prompt_ids.min() < 0):
            raise ValueError(f"prompt_ids needs at least one token id, all >= 0, got {len(self.prompt_ids)}")
        if self.logprobs.max() > 1e-5:
            raise ValueError(f"log-probs must be <= 0, got {self.logprobs.max()}")
        if self.kept_count.min() < 1:
            raise ValueError(f"kept_count must be >= 1, got {self.kept_count.min()}")
        if self.kept_mass.min() <= 0 or self.kept_mass.max() > 1 + 1e-4:
            raise ValueError(f"kept_mass must lie in (0, 1], got {self.kept_mass.min()}..{self.kept_mass.max()}")
        return self

    def continues(self, prompt_ids: Int32Array) -> Int32Array:
        """What precedes the sample, in a group with this prompt."""
        return prompt_ids if self.prompt_ids is None else self.prompt_ids

    @property
    def num_model_tokens(self) -> int:
        return len(self.logprobs)

    @property
    def num_in_last_turn(self) -> int:
        """Number of model tokens after the last one of the environment."""
        return len(self.token_ids) - max((span.end for span in self.environment), default=0)

    @property
    def is_model(self) -> NDArray[np.bool_]:
        """[T] whether each token is a model's."""
        import numpy as np

        found = np.ones(len(self.token_ids), bool)
        for span in self.environment:
            found[span.start : span.end] = False
        return found


class Group(Record):
    """Exactly the n finished episodes of one job. Aborted ones are never included.

    A plain completion is an episode of one sample. An episode of several turns has one sample too, unless its history
    was rewritten on the way: each fork is a sample of its own, which continues what it read.
    """

    job_id: str
    run_id: str
    prompt_ids: Int32Array
    sampling: Sampling
    samples: Annotated[tuple[Sample, ...], Field(min_length=1)]
    """Episode by episode, in the order in which they ended."""
    episode_sizes: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """[n] number of samples of each episode; empty if every episode has one."""
    rewards: tuple[float | None, ...] = ()
    """[n] what a harness gave each episode, None if nothing; empty if no harness played them."""
    metrics: tuple[Annotated[dict[Name, Value], Field(max_length=MAX_METRICS + len(COUNTED))], ...] = ()
    """[n] what the replica and the harness counted in each episode; empty if no harness played them."""
    task_digest: str = ""
    """Job.task_digest."""
    sink: Sink
    replica_id: str
    """Which drew the last turn."""
    engine: EngineFacts
    """Likewise."""
    engines: tuple[EngineFacts, ...] = ()
    """The others, if turns were drawn by engines that differ."""
    metadata: Metadata = Field(default_factory=dict)
    generate_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds from the request to the engine to the last token; for a client's job, waits for slots included; for
    episodes, of the longest, from its first turn to its last."""
    finished_at: float = 0.0

    @model_validator(mode="after")
    def _divided(self) -> Group:
        if self.episode_sizes and sum(self.episode_sizes) != len(self.samples):
            raise ValueError(f"episode_sizes {list(self.episode_sizes)} do not add up to {len(self.samples)} samples")
        for name in ("rewards", "metrics"):
            num = len(getattr(self, name))
            if num not in (0, len(self.episode_sizes or self.samples)):
                raise ValueError(f"{name} has {num} values, but there are {len(self.episodes)} episodes")
        return self

    @classmethod
    def joined(cls, groups: Sequence[Group]) -> Group:
        """The episodes of a job, of which each is a group of its own, as one group."""
        first, last = groups[0], max(groups, key=lambda group: group.finished_at)
        engines = dict.fromkeys(facts for group in groups for facts in (group.engine, *group.engines))
        samples = []
        for group in groups:
            same = group.prompt_ids.tobytes() == first.prompt_ids.tobytes()
            for sample in group.samples:
                own = sample.prompt_ids if same else sample.continues(group.prompt_ids)
                samples.append(sample.model_copy(update={"prompt_ids": own}))
        return cls(
            **{
                name: getattr(first, name)
                for name in ("job_id", "run_id", "prompt_ids", "sampling", "task_digest", "sink", "metadata")
            },
            samples=tuple(samples),
            episode_sizes=tuple(size for group in groups for size in group.episode_sizes),
            rewards=tuple(reward for group in groups for reward in group.rewards),
            # An older replica counts nothing.
            metrics=tuple(counted for group in groups for counted in group.metrics or ({},)),
            replica_id=last.replica_id,
            engine=last.engine,
            engines=tuple(facts for facts in engines if facts != last.engine),
            generate_s=max(group.generate_s for group in groups),
            finished_at=last.finished_at,
        )

    @property
    def episodes(self) -> list[tuple[Sample, ...]]:
        """The samples of each of the n episodes."""
        samples = iter(self.samples)
        return [tuple(islice(samples, size)) for size in self.episode_sizes or (1,) * len(self.samples)]

    @property
    def num_model_tokens(self) -> int:
        return sum(sample.num_model_tokens for sample in self.samples)


class DeadLetter(Record):
    """A job that will never become a group. Its tombstone on the groups stream tells the trainer that it has ended."""

    job_id: str
    run_id: str
    sink: Sink
    error: str
    deliveries: int
    replica_id: str
    died_at: float
