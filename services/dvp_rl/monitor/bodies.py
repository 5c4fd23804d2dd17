"""Bodies of the page's API, and of `dvp-queue --json` for dead letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import Field

from dvp_rl.contract.http import Body, QueueHealth
from dvp_rl.contract.job import Sink
from dvp_rl.http.api_tokens import Scope
from dvp_rl.transport.dead_letters import EXPLANATIONS, Letter, Outcome, Prospect

MAX_ENTRIES = 1_000
ENTRY_ID = r"^[0-9]{1,20}-[0-9]{1,20}$"

EntryId = Annotated[str, Field(pattern=ENTRY_ID)]


class LetterBody(Body):
    entry_id: str
    job_id: str
    sink: Sink
    error: str
    replica_id: str
    deliveries: int
    died_at: float
    """Unix seconds."""
    prospect: Prospect
    num_prompt_tokens: int | None
    """null if what died was not a readable job."""

    @classmethod
    def of(cls, letter: Letter) -> Self:
        fields = ("job_id", "sink", "error", "replica_id", "deliveries", "died_at")
        return cls(
            entry_id=letter.entry_id,
            prospect=letter.prospect,
            num_prompt_tokens=None if letter.job is None else len(letter.job.prompt_ids),
            **{name: getattr(letter.letter, name) for name in fields},
        )


class LetterDetail(LetterBody):
    job: dict[str, Any] | None
    """The whole job, including its prompt; null if it was not readable."""

    @classmethod
    def of(cls, letter: Letter) -> Self:
        job = None if letter.job is None else letter.job.model_dump(mode="json")
        return cls(**LetterBody.of(letter).model_dump(), job=job)


class LetterPage(Body):
    letters: tuple[LetterBody, ...]
    next: str | None
    """Value of `before` that gets the next page; null on the last."""

    @classmethod
    def of(cls, letters: Sequence[Letter], count: int) -> Self:
        full = len(letters) == count
        return cls(letters=tuple(map(LetterBody.of, letters)), next=letters[-1].entry_id if full else None)


class Selection(Body):
    entry_ids: Annotated[tuple[EntryId, ...], Field(min_length=1, max_length=MAX_ENTRIES, fail_fast=True)]


class Fate(Body):
    """What became of one letter."""

    entry_id: str
    outcome: Outcome
    detail: str = ""

    @classmethod
    def of(cls, entry_id: str, outcome: Outcome) -> Self:
        return cls(entry_id=entry_id, outcome=outcome, detail=EXPLANATIONS.get(outcome, ""))


class Fates(Body):
    fates: tuple[Fate, ...]


class Change(Body):
    at: float
    """Unix seconds."""
    by: str
    did: str
    what: str


class Changes(Body):
    """Newest first."""

    changes: tuple[Change, ...]


class Viewer(Body):
    name: str
    """Empty if no token is needed."""
    scope: Scope
    """`operate` may replay and drop."""


class Picture(Body):
    """What the page shows at one moment."""

    at: float
    """Unix seconds."""
    run_id: str
    error: str
    """Why the broker does not answer; the other fields then hold what was seen last. Empty if it answers."""
    health: QueueHealth | None = None
    rates: dict[str, float] = Field(default_factory=dict)
    """The run's counters as rates per second, over the last half minute."""
    newest_version: str = ""
    """The version announced last."""
    min_seq: int = 0
    """Oldest weight seq that may take jobs."""
    trainer_waiting_s: float = 0.0
    used_memory: int = 0
    maxmemory: int = 0
    """0: no limit."""
    letters: LetterPage = LetterPage(letters=(), next=None)
    """The newest page."""


class Line(Body):
    label: str
    points: tuple[tuple[float, float], ...]
    """Pairs (step, value)."""


class Panel(Body):
    title: str
    caption: str
    lines: tuple[Line, ...]


class Histogram(Body):
    title: str
    caption: str
    bars: tuple[tuple[str, float], ...]
    """Pairs (label, share of all)."""


class Curves(Body):
    error: str = ""
    panels: tuple[Panel, ...] = ()
    staleness: Histogram | None = None
    """null until a group has been trained."""
