"""`dvp-queue`: inspects and repairs the queue of a run while the system runs."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from heapq import nlargest
from operator import attrgetter
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import typer
from rich.console import Console

from dvp_rl.contract.errors import ConfigError, NotFoundError, RequestError, UnavailableError
from dvp_rl.contract.job import JobState
from dvp_rl.contract.weights import RUN_ID
from dvp_rl.extras import print_version
from dvp_rl.settings import user_errors
from dvp_rl.transport.audit import Change, changes
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.dead_letters import DeadLetters, Outcome
from dvp_rl.transport.health import queue_health, take_snapshot
from dvp_rl.transport.pending import Pending, Stream, pending
from dvp_rl.transport.results import ClientJob, Held, client_jobs
from dvp_rl.transport.roles import Role, rules
from dvp_rl.transport.runs import check_run, close_queue, latest_runs, open_queue, purge_run
from dvp_rl.transport.sessions import OpenSession, SessionStore, open_sessions
from dvp_rl.transport.submission import Submission
from dvp_rl.transport.urls import DEFAULT_URL

from .bodies import Fate, Fates, LetterDetail, LetterPage, RunState, RunStates
from .runs import run_states
from .settings import DEFAULT_RUN, QueueSettings
from .tables import (
    output,
    show_changes,
    show_client_jobs,
    show_health,
    show_letter,
    show_letters,
    show_outcomes,
    show_pending,
    show_runs,
    show_sessions,
)

T = TypeVar("T")
Row = TypeVar("Row", Pending, Change, ClientJob, OpenSession)

POLL_S = 0.5
MOST_SESSIONS = 10_000
"""Most episodes that --silent-s drops at once."""
DONE = frozenset({Outcome.REPLAYED, Outcome.DROPPED})

app = typer.Typer(
    help="Inspect and repair the queue of a run while the system runs.",
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
)
dead = typer.Typer(help="Jobs that were given up: list, show, replay, drop.", no_args_is_help=True)
app.add_typer(dead, name="dead")
sessions = typer.Typer(
    help="Episodes that are being played, and open sessions of clients: list, drop.", no_args_is_help=True
)
app.add_typer(sessions, name="sessions")
results = typer.Typer(help="What the broker holds for HTTP clients: list, drop.", no_args_is_help=True)
app.add_typer(results, name="results")

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Count = Annotated[int, typer.Option(min=1, max=1000, help="Entries per page.")]
Rows = Annotated[int, typer.Option(min=1, max=1000, help="Rows to show.")]
Ids = Annotated[list[str] | None, typer.Argument(metavar="[ENTRY]...", help="Entries as the list shows them.")]
All = Annotated[bool, typer.Option("--all", help="All that exist now.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def main() -> None:
    with user_errors("dvp-queue"):
        app()


@app.callback(invoke_without_command=True)
def connection(
    context: typer.Context,
    redis_url: Annotated[
        str | None, typer.Option(help="URL of the broker; or DVP_QUEUE__REDIS_URL.", show_default=DEFAULT_URL)
    ] = None,
    run_id: Annotated[
        str | None, typer.Option(help="Training run; or DVP_QUEUE__RUN_ID.", show_default=DEFAULT_RUN)
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with these settings.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved settings and exit.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    given = {"--redis-url": redis_url, "--run-id": run_id, "--config": config}
    argv = [part for name, value in given.items() if value is not None for part in (name, str(value))]
    context.obj = [*argv, "--dry-run"] if dry_run else argv
    if dry_run:
        QueueSettings.load(context.obj)
    if context.invoked_subcommand is None:
        raise ConfigError("no command; see dvp-queue --help")


@app.command()
def status(context: typer.Context, as_json: Json = False) -> None:
    """Show the state of the queue, what is wrong, and what to do about it."""
    health = _run(context, queue_health)
    if as_json:
        typer.echo(health.model_dump_json(indent=2))
    else:
        show_health(output(), health)


@app.command(name="runs")
def show_all(context: typer.Context, as_json: Json = False) -> None:
    """List the runs of this broker, those with a live trainer first."""

    async def states_of_all(broker: Broker) -> tuple[RunState, ...]:
        return await run_states(broker, await latest_runs(broker))

    states = _run(context, states_of_all, must_exist=False)
    if as_json:
        typer.echo(RunStates(runs=states, total=len(states)).model_dump_json(indent=2))
    else:
        show_runs(output(), states)


@app.command(name="pending")
def show_held(
    context: typer.Context,
    stream: Annotated[Stream, typer.Option(help="Stream to list.")] = Stream.JOBS,
    count: Count = 50,
    after: Annotated[str | None, typer.Option(help="Last entry of the previous page.")] = None,
    as_json: Json = False,
) -> None:
    """Show which replica or trainer holds which entries, and for how long."""
    rows = _run(context, lambda broker: pending(broker, stream, count, after=after))
    _show_rows(rows, show_pending, as_json)


@app.command()
def drain(
    context: typer.Context,
    reason: Annotated[str, typer.Option(help="Shown to anyone who asks why nothing is admitted.")] = "drained by hand",
    wait: Annotated[bool, typer.Option(help="Wait until nothing is queued or running.")] = True,
    timeout_s: Annotated[float, typer.Option(min=0, help="Longest wait.")] = 3600.0,
    as_json: Json = False,
) -> None:
    """Stop admitting jobs and wait until the others have ended. Stays in effect until `dvp-queue open`."""

    async def close_and_wait(broker: Broker) -> None:
        await close_queue(broker, reason, by=_me())
        if wait:
            await _empty(broker, timeout_s)

    _run(context, close_and_wait)
    words = "closed" + (", and nothing is queued or running" if wait else "") + "; dvp-queue open admits jobs again"
    typer.echo(json.dumps({"closed": True, "empty": wait or None}) if as_json else words)


@app.command(name="open")
def reopen(context: typer.Context, as_json: Json = False) -> None:
    """Admit jobs again after a drain."""
    was_closed = _run(context, lambda broker: open_queue(broker, by=_me()))
    words = "open again" if was_closed else "was already open"
    typer.echo(json.dumps({"closed": False, "was_closed": was_closed}) if as_json else words)


@app.command()
def purge(
    context: typer.Context,
    yes: Yes = False,
    force: Annotated[bool, typer.Option("--force", help="Even if a trainer or replicas work on the run.")] = False,
    as_json: Json = False,
) -> None:
    """Remove all that the broker holds of this run except the audit: jobs, groups, dead letters, versions, books."""
    run_id = QueueSettings.load(context.obj).run_id
    if not yes and typer.prompt(f"This removes run {run_id} from the broker. Type its name", err=True) != run_id:
        raise RequestError("the name does not match; nothing was removed")
    removed = _run(context, lambda broker: purge_run(broker, by=_me(), force=force))
    words = f"run {run_id} is gone, with the records of {removed} jobs, results and replicas"
    typer.echo(json.dumps({"run_id": run_id, "removed": removed}) if as_json else words)


@app.command()
def audit(context: typer.Context, count: Count = 50, as_json: Json = False) -> None:
    """Show who changed the run by hand, including purges, and which trainer published which weights. Newest first."""

    async def known(broker: Broker) -> list[Change]:
        found = await changes(broker, count)
        if not found:
            await check_run(broker)
        return found

    found = _run(context, known, must_exist=False)
    _show_rows(found, show_changes, as_json)


@app.command()
def users(
    run: Annotated[str, typer.Argument(help="The only run that the users may touch.", show_default="any")] = "*",
) -> None:
    """Print the rules of each part's Redis user, without passwords, in the format of redis.conf and users.acl."""
    if run != "*" and not re.fullmatch(RUN_ID, run):
        raise RequestError(f"run {run!r}: must match {RUN_ID}")
    for role in Role:
        typer.echo(f"user {role} {rules(role, run)}")


@dead.command(name="list")
def list_letters(
    context: typer.Context,
    count: Count = 20,
    before: Annotated[str | None, typer.Option(help="Last entry of the previous page.")] = None,
    as_json: Json = False,
) -> None:
    """List dead letters, newest first."""
    letters = _run(context, lambda broker: DeadLetters(broker).page(count, before=before))
    page = LetterPage.of(letters, count)
    if as_json:
        typer.echo(page.model_dump_json(indent=2))
        return
    show_letters(output(), letters)
    if page.next:
        typer.echo(f"more: dvp-queue dead list --before {page.next}")


@dead.command()
def show(
    context: typer.Context,
    entry: Annotated[str, typer.Argument(help="Entry as the list shows it.")],
    as_json: Json = False,
) -> None:
    """Show one letter with its whole error and its job."""
    letter = _run(context, lambda broker: DeadLetters(broker).get(entry))
    if as_json:
        typer.echo(LetterDetail.of(letter).model_dump_json(indent=2))
    else:
        show_letter(output(), letter)


@dead.command()
def replay(
    context: typer.Context, entries: Ids = None, everything: All = False, yes: Yes = False, as_json: Json = False
) -> None:
    """Put the jobs back into the queue, as if they had never died."""

    async def one_by_one(broker: Broker) -> list[Fate]:
        letters = DeadLetters(broker, by=_me())
        wanted = [await letters.get(entry) for entry in entries or ()]
        outcomes = await letters.replay(wanted)
        return [Fate.of(letter.entry_id, outcome) for letter, outcome in zip(wanted, outcomes, strict=True)]

    async def all_of_them(broker: Broker) -> list[Fate]:
        letters, fates = DeadLetters(broker, by=_me()), list[Fate]()
        async for page in letters.pages():
            outcomes = await letters.replay(page)
            fates += [Fate.of(letter.entry_id, outcome) for letter, outcome in zip(page, outcomes, strict=True)]
        return fates

    _change(context, "Replay", entries, everything, yes, as_json, all_of_them if everything else one_by_one)


@dead.command()
def drop(
    context: typer.Context, entries: Ids = None, everything: All = False, yes: Yes = False, as_json: Json = False
) -> None:
    """Delete letters, with their jobs."""

    async def one_by_one(broker: Broker) -> list[Fate]:
        outcomes = await DeadLetters(broker, by=_me()).drop(entries or ())
        return [Fate.of(entry, outcome) for entry, outcome in zip(entries or (), outcomes, strict=True)]

    async def all_of_them(broker: Broker) -> list[Fate]:
        letters, fates = DeadLetters(broker, by=_me()), list[Fate]()
        async for page in letters.pages():
            ids = [letter.entry_id for letter in page]
            fates += [Fate.of(*pair) for pair in zip(ids, await letters.drop(ids), strict=True)]
        return fates

    _change(context, "Drop", entries, everything, yes, as_json, all_of_them if everything else one_by_one)


@results.command(name="list")
def list_results(
    context: typer.Context,
    count: Rows = 20,
    as_json: Json = False,
) -> None:
    """List results, dead letters of clients, and jobs in work with the size that they may reach. Largest first."""
    jobs = nlargest(count, _run(context, client_jobs), key=attrgetter("num_bytes"))
    _show_rows(jobs, show_client_jobs, as_json)


@results.command(name="drop")
def drop_results(
    context: typer.Context,
    jobs: Annotated[list[str] | None, typer.Argument(metavar="[JOB]...", help="Jobs as the list shows them.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All results that exist now; no job in work.")] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete results, read or not. A job that is named and still in work is cancelled."""
    _confirm("Drop all results", jobs, everything, yes)

    async def drop_them(broker: Broker) -> Dropped:
        submission, names, me = Submission(broker), jobs or [], _me()
        if everything:
            names = [job.name for job in await client_jobs(broker) if job.held is Held.DONE]
        only = JobState.DONE if everything else None
        return await _drop_each(names, lambda name: submission.delete(name, only=only, by=me))

    _show_dropped(_run(context, drop_them), as_json, may_be_gone=everything)


@sessions.command(name="list")
def list_sessions(
    context: typer.Context,
    count: Rows = 50,
    as_json: Json = False,
) -> None:
    """List open sessions with their turns and how long they have been silent. Those that expire first come first."""
    found = _run(context, lambda broker: open_sessions(broker, count))
    _show_rows(found, show_sessions, as_json)


@sessions.command(name="drop")
def drop_sessions(
    context: typer.Context,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[SESSION]...", help="Sessions as the list shows them.")
    ] = None,
    silent_s: Annotated[
        float | None,
        typer.Option(
            min=0, help="All episodes without a turn or heartbeat for so long, at most 10,000.", show_default=False
        ),
    ] = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete sessions with their turns. An episode that is being played goes to the next harness that asks."""
    _confirm(
        f"Drop all episodes without a turn or heartbeat for {silent_s} s",
        names,
        silent_s is not None,
        yes,
        "--silent-s",
    )

    async def drop_them(broker: Broker) -> Dropped:
        store, chosen, me = SessionStore(broker), names or [], _me()
        if silent_s is not None:
            found = await open_sessions(broker, MOST_SESSIONS, clients=False)
            chosen = [one.session_id for one in found if one.silent_s >= silent_s]
        return await _drop_each(chosen, lambda name: store.drop(name, by=me, silent_s=silent_s))

    _show_dropped(_run(context, drop_them), as_json, may_be_gone=silent_s is not None)


def _show_rows(rows: Sequence[Row], show: Callable[[Console, Sequence[Row]], None], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([row._asdict() for row in rows], indent=2))
    else:
        show(output(), rows)


class Dropped(NamedTuple):
    dropped: int
    left: list[str]
    """Why each of the others was left alone."""


async def _drop_each(names: Sequence[str], drop: Callable[[str], Awaitable[object]]) -> Dropped:
    left: list[str] = []
    for name in names:
        try:
            await drop(name)
        except (NotFoundError, RequestError) as error:
            left.append(str(error))
    return Dropped(len(names) - len(left), left)


def _show_dropped(done: Dropped, as_json: bool, *, may_be_gone: bool) -> None:
    """Exits with code 1 if any was left alone, unless it `may_be_gone` since it was chosen."""
    typer.echo(json.dumps(done._asdict()) if as_json else "\n".join([f"{done.dropped} dropped", *done.left]))
    if done.left and not may_be_gone:
        raise typer.Exit(1)


def _change(
    context: typer.Context,
    verb: str,
    entries: Iterable[str] | None,
    everything: bool,
    yes: bool,
    as_json: bool,
    work: Callable[[Broker], Awaitable[list[Fate]]],
) -> None:
    """Asks for confirmation, does the work and shows the outcomes. Exits with code 1 if any letter was left alone."""
    _confirm(f"{verb} all dead letters", entries, everything, yes)
    fates = _run(context, work)
    if as_json:
        typer.echo(Fates(fates=tuple(fates)).model_dump_json(indent=2))
    else:
        show_outcomes(output(), (fate.outcome for fate in fates))
    if any(fate.outcome not in DONE for fate in fates):
        raise typer.Exit(1)


def _confirm(question: str, named: Iterable[str] | None, everything: bool, yes: bool, option: str = "--all") -> None:
    """`option`: the one that names everything."""
    if bool(named) == everything:
        raise RequestError(f"name them as the list shows them, or pass {option}")
    if everything and not yes:
        typer.confirm(f"{question}?", abort=True, err=True)


async def _empty(broker: Broker, timeout_s: float) -> None:
    snapshot = await take_snapshot(broker)
    with Console(stderr=True).status("waiting") as line:
        try:
            async with asyncio.timeout(timeout_s):
                while snapshot.num_jobs or snapshot.num_episodes:
                    line.update(f"{snapshot.work} are queued or running")
                    await asyncio.sleep(POLL_S)
                    snapshot = await take_snapshot(broker)
        except TimeoutError:
            raise UnavailableError(
                f"{snapshot.work} are still queued or running after {timeout_s:g} s, and no new ones are admitted. "
                "dvp-queue pending shows who holds them (clients' with --stream client_jobs; episodes: dvp-queue "
                "sessions list); dvp-queue open ends the drain"
            ) from None


def _me() -> str:
    """The user as this machine knows them, unverified: anybody with the broker's password can claim any name."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()} (dvp-queue)".encode(errors="replace").decode()


def _run(context: typer.Context, work: Callable[[Broker], Awaitable[T]], *, must_exist: bool = True) -> T:
    """The result of `work` with a connection to the run."""
    settings = QueueSettings.load(context.obj)

    async def connected() -> T:
        broker = await Broker.connect(settings.redis_url, settings.run_id, role=Role.OPERATOR, create=False)
        async with broker:
            if must_exist:
                await check_run(broker)
            return await work(broker)

    return asyncio.run(connected())


if __name__ == "__main__":
    main()
