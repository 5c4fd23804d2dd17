"""Output of `dvp-queue` for terminals."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dvp_rl.contract.http import QueueHealth, Severity, StreamHealth
from dvp_rl.transport.audit import Change
from dvp_rl.transport.dead_letters import EXPLANATIONS, Letter, Outcome, Prospect
from dvp_rl.transport.pending import Pending
from dvp_rl.transport.results import ClientJob
from dvp_rl.transport.sessions import OpenSession

from .bodies import RunState

MAX_ERROR_CHARS = 100
UNWRAPPED = 10_000
"""Columns of an output that is no terminal."""
STYLES = {Severity.CRITICAL: "bold red", Severity.WARNING: "bold yellow", Severity.INFO: "bold green"}


def output() -> Console:
    """Standard output; lines wrap only on a terminal, so that a pipe gets whole ids."""
    return Console(width=None if sys.stdout.isatty() else UNWRAPPED)


def show_health(console: Console, health: QueueHealth) -> None:
    style = STYLES[health.reasons[0].severity if health.reasons else Severity.INFO]
    console.print(Text.assemble((health.verdict, style), f"  run {health.run_id}"))
    for reason in health.reasons:
        console.print(_plain(f"  {reason.verdict}: {reason.detail}"))
        console.print(_plain(f"    {reason.remedy}"), style="dim")
    streams = _table("", "waiting", "held", "oldest", "redelivered", numbers=4)
    rows = {
        "jobs": health.jobs,
        "episodes": health.episodes,
        "client jobs": health.client_jobs,
        "groups": health.groups,
    }
    for name, stream in rows.items():
        if stream is not None:
            streams.add_row(name, *_stream(stream))
    console.print(streams)
    counts = ("in_flight", "uncheckpointed", "dead", "duplicates", "client_sessions")
    console.print(Text("  ".join(f"{name.replace('_', ' ')} {getattr(health, name)}" for name in counts)))
    if health.trainer:
        console.print(_plain(f"trainer at step {health.trainer.step}, seen {duration(health.trainer.last_seen_s)} ago"))
    replicas = _table("replica", "state", "version", "in flight", "seen", numbers=2)
    for replica in health.replicas:
        seen = duration(replica.last_seen_s)
        version = replica.version + " (wrong)" * bool(replica.wrong)
        replicas.add_row(_plain(replica.id), replica.state, _plain(version), str(replica.in_flight), seen)
    if health.replicas:
        console.print(replicas)


def show_runs(console: Console, states: Sequence[RunState]) -> None:
    table = _table("run", "verdict", "trainer", "step", "replicas", "dead letters", numbers=3)
    for state in states:
        seen = "-" if state.seen_s is None else f"seen {duration(state.seen_s)} ago"
        counts = ["-" if number is None else str(number) for number in (state.step, state.num_replicas, state.dead)]
        table.add_row(_plain(state.run_id), _plain(state.error or str(state.verdict)), seen, *counts)
    console.print(table if states else "no runs on this broker")


def show_letters(console: Console, letters: Sequence[Letter]) -> None:
    table = _table("entry", "job", "sink", "died", "deliveries", "error", "replay")
    for entry_id, letter, _, prospect in letters:
        error = letter.error if len(letter.error) <= MAX_ERROR_CHARS else f"{letter.error[:MAX_ERROR_CHARS]}..."
        ago = duration(time.time() - letter.died_at)
        cells = (letter.job_id, letter.sink, f"{ago} ago", str(letter.deliveries), error)
        table.add_row(entry_id, *map(_plain, cells), "yes" if prospect is Prospect.OPEN else prospect.replace("_", " "))
    console.print(table if letters else "no dead letters")


def show_letter(console: Console, letter: Letter) -> None:
    facts: dict[str, object] = {"entry": letter.entry_id, **letter.letter.model_dump()}
    if letter.job is not None:
        job = letter.job
        facts |= {"prompt": f"{len(job.prompt_ids)} tokens (all of them with --json)", "n": job.n}
        facts |= {"sampling": job.sampling.model_dump_json(), "metadata": job.metadata, "min_seq": job.min_seq}
    if letter.prospect is not Prospect.OPEN:
        facts["replay"] = f"no: {EXPLANATIONS[Outcome(letter.prospect)]}"
    table = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        table.add_row(Text(name, style="dim"), _plain(str(value), lines=True))
    console.print(table)


def show_outcomes(console: Console, outcomes: Iterable[Outcome]) -> None:
    counts = Counter(outcomes)
    if not counts:
        console.print("no dead letters")
    for outcome, number in counts.items():
        explanation = EXPLANATIONS.get(outcome)
        console.print(Text(f"{number} {outcome}" if explanation is None else f"{number} left alone: {explanation}"))


def show_pending(console: Console, rows: Sequence[Pending]) -> None:
    table = _table("entry", "job", "held by", "silent", "age", "deliveries", numbers=3)
    for row in rows:
        times = (duration(row.silent_s), duration(row.age_s), str(row.deliveries))
        table.add_row(row.entry_id, _plain(row.job_id), _plain(row.holder), *times)
    console.print(table if rows else "nothing is held")


def show_sessions(console: Console, sessions: Sequence[OpenSession]) -> None:
    table = _table(
        "session", "caller", "episode", "turns", "branches", "drifted", "tokens", "silent", "expires in", numbers=6
    )
    for session in sessions:
        episode = f"{session.episode} of {session.sink} job {session.job_id}" if session.job_id else "-"
        counts = (session.turns, session.branches, session.drifted, session.tokens)
        times = (duration(session.silent_s), duration(session.left_s))
        table.add_row(*map(_plain, (session.session_id, session.caller or "-", episode, *map(str, counts), *times)))
    console.print(table if sessions else "no session is open")


def show_client_jobs(console: Console, jobs: Sequence[ClientJob]) -> None:
    table = _table("job", "caller", "state", "expires in", "MiB", numbers=2)
    for job in jobs:
        expires = "-" if job.expires_s is None else duration(job.expires_s)
        table.add_row(_plain(job.name), _plain(job.caller or "-"), job.held, expires, f"{job.num_bytes / 2**20:.2f}")
    console.print(table if jobs else "nothing is held for clients")


def show_changes(console: Console, changes: Sequence[Change]) -> None:
    table = _table("when", "who", "did", "what")
    for change in changes:
        when = datetime.fromtimestamp(change.at).astimezone().isoformat(" ", "seconds")
        table.add_row(when, *map(_plain, change[1:]))
    console.print(table if changes else "nobody has changed anything")


def duration(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"


def _stream(stream: StreamHealth) -> tuple[str, ...]:
    oldest = "-" if stream.oldest_age_s is None else duration(stream.oldest_age_s)
    return str(stream.backlog), str(stream.pending), oldest, str(stream.redelivered)


def _table(*headers: str, numbers: int = 0) -> Table:
    """The last `numbers` columns are right-aligned."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index >= len(headers) - numbers else "left", overflow="fold")
    return table


def _plain(text: str, *, lines: bool = False) -> Text:
    """The text with control characters replaced: errors and ids come from other processes."""
    return Text("".join(c if c.isprintable() or (lines and c == "\n") else "\ufffd" for c in text))
