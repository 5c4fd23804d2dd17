"""Bodies of the page's API, and of `dvp-queue --json` for dead letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import Field

from dvp_rl.contract.completions import PRUNED, Completion
from dvp_rl.contract.http import Body, QueueHealth, Verdict, example
from dvp_rl.contract.job import Sink
from dvp_rl.http.api_tokens import Scope
from dvp_rl.transport.dead_letters import EXPLANATIONS, Letter, Outcome, Prospect

MAX_ENTRIES = 1_000
ENTRY_ID = r"^[0-9]{1,20}-[0-9]{1,20}$"

EntryId = Annotated[str, Field(pattern=ENTRY_ID)]


DEAD: dict[str, Any] = {
    "entry_id": "1795601122334-0",
    "job_id": "37+58-row-7",
    "sink": "client",
    "error": "generation took longer than 3600 s",
    "replica_id": "replica-1",
    "deliveries": 3,
    "died_at": 1795601122.334,
    "prospect": "open",
    "num_prompt_tokens": 6,
}
"""A dead letter, for examples."""


class LetterBody(Body):
    """One dead letter, without its prompt."""

    entry_id: str
    """Id of the letter: milliseconds since 1970 and a number."""
    job_id: str
    """Id of the job that was given up; empty if it was not readable."""
    sink: Sink
    """Whose job it was: train and eval are the trainer's, client came over HTTP."""
    error: str
    """Why it was given up."""
    replica_id: str
    """The replica that gave it up, or was lost with it; empty if it was no replica."""
    deliveries: int
    """Tries that failed: an error of the engine, or a replica that was lost. A replay starts from zero."""
    died_at: float
    """Unix seconds."""
    prospect: Prospect
    """open: it can be replayed. closed: the trainer has counted it as dead. again: a job with the same id was submitted
    since. no_job: it holds no readable job."""
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
    """Some dead letters, newest first."""

    model_config = example(letters=[DEAD], next=DEAD["entry_id"])

    letters: tuple[LetterBody, ...]
    """The letters of this page."""
    next: str | None
    """Value of `before` that gets the next page; null if this one is not full."""

    @classmethod
    def of(cls, letters: Sequence[Letter], count: int) -> Self:
        full = len(letters) == count
        return cls(letters=tuple(map(LetterBody.of, letters)), next=letters[-1].entry_id if full else None)


class Selection(Body):
    """Dead letters to act on."""

    model_config = example(entry_ids=[DEAD["entry_id"]])

    entry_ids: Annotated[tuple[EntryId, ...], Field(min_length=1, max_length=MAX_ENTRIES, fail_fast=True)]
    """Their ids, from GET /v1/dead."""


class Fate(Body):
    """What became of one letter."""

    entry_id: str
    """Id of the letter."""
    outcome: Outcome
    """replayed, dropped, or why the letter was left alone."""
    detail: str = ""
    """The same in words; empty if it was replayed or dropped."""

    @classmethod
    def of(cls, entry_id: str, outcome: Outcome) -> Self:
        return cls(entry_id=entry_id, outcome=outcome, detail=EXPLANATIONS.get(outcome, ""))


class Fates(Body):
    """What became of each letter."""

    model_config = example(fates=[{"entry_id": DEAD["entry_id"], "outcome": "replayed", "detail": ""}])

    fates: tuple[Fate, ...]
    """One per id, in the order of the request."""


class Change(Body):
    """Something that was done to the run by hand, or weights that were published."""

    at: float
    """Unix seconds, by the broker's clock."""
    by: str
    """Who did it."""
    did: str
    """What was done, e.g. replayed."""
    what: str
    """To what, e.g. the id of a job."""


class Changes(Body):
    """Newest first."""

    model_config = example(
        changes=[{"at": 1795601199.5, "by": "operate/bob (dvp-monitor)", "did": "replayed", "what": DEAD["job_id"]}]
    )

    changes: tuple[Change, ...]
    """The last changes."""


class Viewer(Body):
    """The caller, as this service knows it."""

    model_config = example(name="bob", scope="operate")

    name: str
    """Name of the caller's token. Empty if no token is needed."""
    scope: Scope
    """`operate` may replay and drop."""


class Picture(Body):
    """What the page shows at one moment."""

    at: float
    """Unix seconds."""
    run_id: str
    """The training run."""
    error: str
    """Why the broker does not answer; the other fields then hold what was seen last. Empty if it answers."""
    health: QueueHealth | None = None
    """null before the broker has answered."""
    rates: dict[str, float] = Field(default_factory=dict)
    """The run's counters as rates per second, over the last half minute."""
    newest_version: str = ""
    """The version announced last."""
    min_seq: int = 0
    """Oldest weight seq that may take jobs."""
    trainer_waiting_s: float = 0.0
    """Seconds for which the trainer has waited for a batch."""
    used_memory: int = 0
    """Memory that the broker uses, in bytes."""
    maxmemory: int = 0
    """The broker's limit, in bytes; 0: none."""
    letters: LetterPage = LetterPage(letters=(), next=None)
    """The newest page."""


class Line(Body):
    """One curve."""

    label: str
    """What it shows."""
    points: tuple[tuple[float, float], ...]
    """Pairs (step, value)."""
    newest: tuple[float, float]
    """The newest step and its value."""


class Panel(Body):
    """Curves on one chart."""

    title: str
    """Heading of the chart."""
    caption: str
    """What to look for."""
    unit: str
    """Unit of the values."""
    lines: tuple[Line, ...]
    """Its curves."""


class Histogram(Body):
    """Shares of all, as bars."""

    title: str
    """Heading of the chart."""
    caption: str
    """What to look for."""
    bars: tuple[tuple[str, float], ...]
    """Pairs (label, share of all)."""


class Curves(Body):
    """The training curves, from the trainer's metrics file."""

    error: str = ""
    """Why the file cannot be read; empty if it can."""
    panels: tuple[Panel, ...] = ()
    """The charts."""
    times: tuple[tuple[float, float], ...] = ()
    """Pairs (step, Unix seconds at which it was logged)."""
    steps_per_point: int = 1
    """Each point is the mean of up to so many steps."""
    staleness: Histogram | None = None
    """null until a group has been trained."""


class CompletionSteps(Body):
    """The steps of which the trainer has recorded completions."""

    error: str = ""
    """Why the file cannot be read; empty if it can."""
    since: float
    """When this monitor first saw the file, in unix seconds. A resumed trainer writes a new one, in which steps that it
    trains again have other completions."""
    steps: tuple[int, ...] = ()
    """The newest ones, in the order of training."""


class Shown(Body):
    """One completion."""

    row: int
    """Row number in the data set."""
    prompt: str
    """The end of the prompt as the model reads it, special tokens included."""
    pieces: tuple[tuple[str, int], ...]
    """Pairs (text, mark): the mark is the number of thresholds in `pruned` that min-p has reached at a token of it, or
    -1 for text that the environment gave."""
    answer: str | None
    """The row's answer."""
    reward: float
    """What the reward function gave."""
    advantage: float
    """Reward compared with the others of its group."""
    fate: str
    """What training did with the completion: trained, or why it did not count."""
    weight: float | None
    """Mean importance weight of its tokens; null if its group did not reach the model."""
    finish_reason: str
    """Why it ended."""
    num_tokens: int
    """Its length."""
    num_environment: int
    """How many of its tokens the environment gave."""
    num_forks: int
    """Number of earlier samples of its episode, whose history was then rewritten."""

    @classmethod
    def of(cls, completion: Completion) -> Self:
        pieces = tuple((_sound(text), mark) for text, mark in completion.pieces())
        fields = {name: _sound(getattr(completion, name)) for name in cls.model_fields if name != "pieces"}
        return cls(pieces=pieces, **fields)


def _sound(value: Any) -> Any:
    """Replaces half characters (lone surrogates), which data can hold and JSON in UTF-8 cannot."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


class Completions(Body):
    """What the trainer has recorded of one step: the best and the worst completion of some prompts."""

    model_config = example(
        step=120,
        pruned=PRUNED,
        completions=[
            {
                "row": 7,
                "prompt": "Compute 37+58.",
                "pieces": [["The sum is ", 0], ["95", 1]],
                "answer": "95",
                "reward": 1.0,
                "advantage": 0.5,
                "fate": "trained",
                "weight": 0.9987,
                "finish_reason": "stop",
                "num_tokens": 5,
                "num_environment": 0,
                "num_forks": 0,
            }
        ],
    )

    step: int
    """The batch they belong to."""
    pruned: tuple[float, ...]
    """Shares of probability that min-p removed at a token, from which its text is marked."""
    completions: tuple[Shown, ...]
    """Prompt by prompt, the best one first."""


class RunState(Body):
    """A run of the broker, in short."""

    run_id: str
    """The training run."""
    error: str = ""
    """Why its state cannot be read; empty if it can."""
    verdict: Verdict | None = None
    """How its queue is; null if it cannot be read."""
    step: int | None = None
    """Step of its trainer; null if it has never been seen."""
    seen_s: float | None = None
    """Seconds since its trainer was last seen; null if it never was."""
    num_replicas: int | None = None
    """Replicas that are alive; null if its state cannot be read."""
    dead: int | None = None
    """Dead letters; null if its state cannot be read."""


class RunStates(Body):
    """The runs of the broker, those with a live trainer first."""

    runs: tuple[RunState, ...]
    """The first of them, if there are very many, and the monitor's own."""
    total: int
    """How many there are."""
