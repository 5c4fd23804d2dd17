"""Sessions: episodes of several turns, recorded token for token.

A session is a list of turns that only grows. A turn continues the recorded text of an earlier one, or begins anew, so
the turns form a tree. Usually it is a single path. A client that rewrites its history, or draws an answer twice, opens
another branch, and none is lost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, NamedTuple

from pydantic import Field, model_validator

from .arrays import Int32Array
from .group import EngineFacts, EnvironmentSpan, FinishReason, Group, Sample, VersionSpan
from .job import BYTES_PER_TOKEN, IDLE_S, JOB_ID, MAX_DEADLINE_S, MAX_GROUP_TOKENS, MAX_SAMPLES, Job, Metadata, Sink
from .metrics import DRIFTED, FORKS, TURNS
from .record import Record
from .sampling import MAX_SEED, Sampling
from .weights import RUN_ID

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_SESSION_BYTES = BYTES_PER_TOKEN * MAX_GROUP_TOKENS
"""Most bytes of all turns of a session together, as stored: as many as a group may have."""
DIGEST_BYTES = 16
MIN_BEAT_S, MAX_BEAT_S = 0.1, 30.0
"""Shortest and longest time between two heartbeats of a session, in seconds."""


def beat_every(idle_s: float) -> float:
    """Time between two heartbeats of a session, in seconds: several within its `idle_s`, so that some may fail."""
    return min(MAX_BEAT_S, max(MIN_BEAT_S, idle_s / 4))


class SessionState(StrEnum):
    """How far a session is."""

    OPEN = "open"
    FINISHED = "finished"


class Fork(StrEnum):
    """Why a turn opened another branch."""

    REWRITTEN = "rewritten"
    """The client sent another history than the recorded one, or drew from it again."""
    DRIFT = "drift"
    """The client sent the recorded answer, but the chat template renders it as another text than was drawn."""


class Session(Record):
    """What is fixed when a session is opened, by a client or, for an episode of a job, by the trainer."""

    session_id: Annotated[str, Field(pattern=JOB_ID)]
    run_id: Annotated[str, Field(pattern=RUN_ID)]
    sink: Sink = Sink.CLIENT
    """Who gets the episode."""
    min_seq: Annotated[int, Field(ge=0)] = 0
    """Oldest weight seq that may draw a turn."""
    sampling: Sampling = Sampling()
    """The policy, and the limits of turns that name none."""
    chat_template_kwargs: Metadata = Field(default_factory=dict)
    task_digest: str = ""
    """Job.task_digest."""
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    """Number of sessions that share the size limit of one group."""
    metadata: Metadata = Field(default_factory=dict)
    idle_s: Annotated[float, Field(gt=0, le=MAX_DEADLINE_S)] = IDLE_S
    """Seconds without a turn or heartbeat after which the session is forgotten."""

    @classmethod
    def of(cls, job: Job, index: int, session_id: str) -> Session:
        """The session in which episode `index` of a job is played."""
        sampling, seed = job.sampling, job.sampling.seed
        if seed is not None:
            # Not that of sample `index`: turns draw from streams (seed, turn), which would be equal in two episodes.
            seed = int(digest(f"{seed}:episode:{index}")[:16], 16) & MAX_SEED
        return cls(
            session_id=session_id,
            **job.model_dump(include={"run_id", "sink", "min_seq", "chat_template_kwargs", "n", "metadata", "idle_s"}),
            task_digest=job.task_digest,
            sampling=sampling.model_copy(update={"seed": seed}),
        )


class Ending(NamedTuple):
    """What a harness says of an episode that it has played."""

    reward: float | None = None
    """What the episode earned; None if the harness does not know."""
    truncated: bool = False
    """The episode was cut off, so that it counts like a sample which max_tokens cut off."""
    metrics: Mapping[str, float] = {}
    """What the harness counted."""


class Turn(Record):
    """What the model drew once, and what it read before that the record did not hold yet."""

    turn_id: Annotated[str, Field(pattern=JOB_ID)]
    """A digest of the request and its key if the client gave one, so that a repeated request has the same."""
    parent: Annotated[int, Field(ge=0)] | None = None
    """Index of the turn that this one continues; None if it begins with an empty context."""
    context_ids: Int32Array
    """The tokens between the parent's last one and the first drawn: the prompt of a turn without parent."""
    sample: Sample
    """The tokens drawn: a plain completion."""
    engine: EngineFacts
    replica_id: str
    num_chars: Annotated[int, Field(ge=0)]
    """Length of the text that the turn adds to its parent's, special tokens included."""
    text_digest: str
    """Digest of that text."""
    answer_digest: str
    """Digest of the answer as the client read it, to tell Fork.DRIFT from Fork.REWRITTEN."""
    fork: Fork | None = None
    """None for the first turn, and for one that continues a branch."""
    at: float
    """Unix time in seconds at which it was drawn."""

    @model_validator(mode="after")
    def _plain(self) -> Turn:
        if self.sample.environment or self.sample.prompt_ids is not None:
            raise ValueError("sample: must be a plain completion: the turn has the context")
        if self.parent is None and len(self.context_ids) == 0:
            raise ValueError("context_ids: needs at least one token id without a parent, got 0")
        return self

    @property
    def num_tokens(self) -> int:
        return len(self.context_ids) + len(self.sample.token_ids)


def digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()


def longest_text(turns: Sequence[Turn], text: str) -> tuple[int | None, int]:
    """The turn with the longest recorded text that `text` begins with, and the text's length; of several, the newest.
    None and 0 if it begins with none of them."""

    def end(turn: Turn, start: int) -> int | None:
        stop = start + turn.num_chars
        return stop if digest(text[start:stop]) == turn.text_digest else None

    return _longest(turns, end)


def longest_history(turns: Sequence[Turn], token_ids: NDArray[np.int32]) -> tuple[int | None, int]:
    """The turn with the longest history that `token_ids`, [P], begins with, and its length; of several, the newest.
    None and 0 if it begins with none of them."""
    import numpy as np

    def end(turn: Turn, start: int) -> int | None:
        own = np.concatenate([turn.context_ids, turn.sample.token_ids])
        stop = start + len(own)
        return stop if np.array_equal(token_ids[start:stop], own) else None

    return _longest(turns, end)


def _longest(turns: Sequence[Turn], end: Callable[[Turn, int], int | None]) -> tuple[int | None, int]:
    """`end`: of a turn's own part in what the client sent, if it begins at this place there; None if it does not."""
    ends: dict[int | None, int] = {None: 0}
    for index, turn in enumerate(turns):  # parents come before their children
        start = ends.get(turn.parent)
        stop = None if start is None else end(turn, start)
        if stop is not None:
            ends[index] = stop
    last = max(ends, key=lambda index: (ends[index], -1 if index is None else index))
    return last, ends[last]


def path(turns: Sequence[Turn], last: int | None) -> list[Turn]:
    """The turns that turn `last` continues, oldest first, and itself; none if it is None."""
    found: list[Turn] = []
    while last is not None:
        found.append(turns[last])
        last = turns[last].parent
    return found[::-1]


def history(turns: Sequence[Turn]) -> NDArray[np.int32]:
    """[L] all tokens of a path."""
    import numpy as np

    parts = [ids for turn in turns for ids in (turn.context_ids, turn.sample.token_ids)]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def branches(turns: Sequence[Turn]) -> list[list[int]]:
    """Indices of all turns, each in one branch: a turn continues its parent's branch, unless another turn did so
    before, and opens one otherwise. The last branch holds the last turn."""
    found: list[list[int]] = []
    open_at: dict[int, list[int]] = {}
    for index, turn in enumerate(turns):
        branch = open_at.pop(turn.parent, None) if turn.parent is not None else None
        if branch is None:
            branch = []
            found.append(branch)
        branch.append(index)
        open_at[index] = branch
    return sorted(found, key=lambda branch: branch[-1])


def num_read(turns: Sequence[Turn]) -> int:
    """Number of tokens of all samples of the episode with their prompts: a branch repeats what it shares."""
    lengths: list[int] = []
    for turn in turns:
        lengths.append(turn.num_tokens + (0 if turn.parent is None else lengths[turn.parent]))
    return sum(lengths[branch[-1]] for branch in branches(turns))


def episode(turns: Sequence[Turn]) -> tuple[Sample, ...]:
    """One sample per branch, which holds each drawn token once. The last one holds the last turn."""
    return tuple(_sample(turns, branch) for branch in branches(turns))


def _sample(turns: Sequence[Turn], branch: Sequence[int]) -> Sample:
    import numpy as np

    first, *rest = (turns[index] for index in branch)
    ids = [first.sample.token_ids]
    versions, environment = list(first.sample.versions), list[EnvironmentSpan]()
    end = len(first.sample.token_ids)
    for turn in rest:
        start = end + len(turn.context_ids)
        if start > end:
            environment.append(EnvironmentSpan(start=end, end=start))
        versions += [
            VersionSpan(version=span.version, start=start + span.start, end=start + span.end)
            for span in turn.sample.versions
        ]
        ids += [turn.context_ids, turn.sample.token_ids]
        end = start + len(turn.sample.token_ids)
    drawn = [first.sample, *(turn.sample for turn in rest)]
    prompt = np.concatenate([history(path(turns, first.parent)), first.context_ids])
    return Sample(
        token_ids=np.concatenate(ids),
        logprobs=np.concatenate([sample.logprobs for sample in drawn]),
        kept_mass=np.concatenate([sample.kept_mass for sample in drawn]),
        kept_count=np.concatenate([sample.kept_count for sample in drawn]),
        finish_reason=drawn[-1].finish_reason,
        versions=tuple(versions),
        environment=tuple(environment),
        prompt_ids=None if branch[0] == 0 else prompt,
        seed=first.sample.seed,
    )


def group_of(session: Session, turns: Sequence[Turn], ending: Ending, job_id: str | None = None) -> Group:
    """The finished session as a group of one episode. Raises ValueError without turns. `job_id`: the job's, if it is
    one of its episodes."""
    *samples, last = episode(turns)
    played = session.sink is not Sink.CLIENT
    counted = {TURNS: len(turns), FORKS: len(samples), DRIFTED: sum(turn.fork is Fork.DRIFT for turn in turns)}
    if ending.truncated:
        last = last.model_copy(update={"finish_reason": FinishReason.LENGTH})
    return Group(
        job_id=job_id or session.session_id,
        run_id=session.run_id,
        prompt_ids=turns[0].context_ids,
        sampling=session.sampling,
        samples=(*samples, last),
        episode_sizes=(len(samples) + 1,),
        rewards=(ending.reward,) if played else (),
        metrics=({**counted, **ending.metrics},) if played else (),
        task_digest=session.task_digest,
        sink=session.sink,
        replica_id=turns[-1].replica_id,
        engine=turns[-1].engine,
        engines=tuple({turn.engine: None for turn in turns[:-1] if turn.engine != turns[-1].engine}),
        metadata=session.metadata,
        generate_s=max(0.0, turns[-1].at - turns[0].at),
        finished_at=turns[-1].at,
    )
