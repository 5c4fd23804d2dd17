"""`dvp-queue` on a real broker, while the run continues."""

from __future__ import annotations

import asyncio
import io
import json
import re
import socket
import subprocess
import sys
from typing import Any, NamedTuple

import pytest

from dvp_rl.contract.http import QueueHealth, ReplicaState
from dvp_rl.contract.job import Sink
from dvp_rl.contract.session import Session
from dvp_rl.monitor.cli import main
from dvp_rl.transport.replicas import ReplicaBeat, ReplicaRegistry
from dvp_rl.transport.runs import close_queue
from dvp_rl.transport.sessions import SessionStore
from tests.integration.monitor.process import HOSTILE
from tests.integration.transport.rig import BLOCK_MS, Harness, Rig
from tests.kit.records import make_group, make_job
from tests.kit.wait import WITHIN_S, until_async


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Cli:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str) -> None:
        self._monkeypatch, self._capsys, self._url = monkeypatch, capsys, url

    async def __call__(self, run_id: str, *args: str, answer: str = "") -> Ran:
        """Runs dvp-queue with `answer` as its standard input."""
        self._monkeypatch.setattr("sys.argv", ["dvp-queue", "--redis-url", self._url, "--run-id", run_id, *args])
        self._monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        code = await asyncio.to_thread(_run)
        return Ran(code, *self._capsys.readouterr())


def _run() -> int:
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broker_url: str) -> Cli:
    monkeypatch.setenv("COLUMNS", "200")
    return Cli(monkeypatch, capsys, broker_url)


async def test_status_says_what_is_wrong(cli: Cli, staged: Rig) -> None:
    ran = await cli(staged.run_id, "status")
    assert (ran.code, ran.err) == (0, "")
    for expected in ("replicas_behind", staged.run_id, "step 42", "replica-1", "dead 3", "serving"):
        assert expected in ran.out
    health = QueueHealth.model_validate((await cli(staged.run_id, "status", "--json")).json)
    assert (health.verdict, health.jobs.backlog, health.jobs.pending, health.dead) == ("replicas_behind", 4, 2, 3)


async def test_wrong_weights_are_marked(cli: Cli, staged: Rig) -> None:
    beat = ReplicaBeat("replica-2", ReplicaState.SERVING, f"{staged.run_id}:7:ab", in_flight=0, wrong="other weights")
    await ReplicaRegistry(staged.broker).beat(beat)
    ran = await cli(staged.run_id, "status")
    for expected in ("wrong_weights", "other weights", "restart them", ":7:ab (wrong)"):
        assert expected in ran.out
    assert ran.out.count("(wrong)") == 1


async def test_runs_of_the_broker_are_listed(cli: Cli, staged: Rig) -> None:
    ran = await cli("another", "runs")
    (line,) = [line.split() for line in ran.out.splitlines() if line.startswith(staged.run_id)]
    assert line[1] == "replicas_behind"
    assert line[-3:] == ["42", "3", "3"]
    states = {state["run_id"]: state for state in (await cli("another", "runs", "--json")).json["runs"]}
    assert states[staged.run_id] | {"seen_s": 0} == {
        "run_id": staged.run_id,
        "error": "",
        "verdict": "replicas_behind",
        "step": 42,
        "seen_s": 0,
        "num_replicas": 3,
        "dead": 3,
    }


async def test_dead_letters_are_listed_in_pages_and_shown(cli: Cli, staged: Rig) -> None:
    ran = await cli(staged.run_id, "dead", "list", "--count", "2")
    assert "CUDA error 2" in ran.out
    assert "\x1b" not in ran.out
    assert "[bold]" in ran.out
    more = ran.out.rpartition("--before ")[2].strip()
    page = (await cli(staged.run_id, "dead", "list", "--count", "2", "--before", more, "--json")).json
    (letter,) = page["letters"]
    assert (page["next"], letter["error"], letter["prospect"]) == (None, f"CUDA error 0: {HOSTILE}", "open")
    shown = (await cli(staged.run_id, "dead", "show", letter["entry_id"], "--json")).json
    assert shown["job"]["prompt_ids"] == [1, 2, 3]
    text = (await cli(staged.run_id, "dead", "show", letter["entry_id"])).out
    assert letter["job_id"] in text
    lines = (await cli(staged.run_id, "dead", "list")).out.splitlines()
    assert any(letter["entry_id"] in line and letter["job_id"] in line for line in lines), "whole ids for a pipe"
    assert "3 tokens" in text


async def test_replay_puts_back_once_and_says_so(cli: Cli, staged: Rig) -> None:
    entry = (await cli(staged.run_id, "dead", "list", "--json")).json["letters"][0]["entry_id"]
    assert await cli(staged.run_id, "dead", "replay", entry) == (0, "1 replayed\n", "")
    again = await cli(staged.run_id, "dead", "replay", entry)
    assert (again.code, again.out) == (2, "")
    assert f"no dead letter {entry}: replayed or dropped before" in again.err
    assert await staged.length(staged.broker.keys.jobs) == 7


async def test_all_asks_first(cli: Cli, staged: Rig) -> None:
    await staged.groups.read(1, BLOCK_MS)  # the trainer counts the first death
    for verb in ("replay", "drop"):
        refused = await cli(staged.run_id, "dead", verb, "--all", answer="n\n")
        assert (refused.code, refused.out.strip()) == (1, "")
        assert await staged.length(staged.broker.keys.dead) == 3
    ran = await cli(staged.run_id, "dead", "replay", "--all", answer="y\n")
    assert ran.code == 1
    assert "2 replayed\n" in ran.out
    assert "1 left alone: the trainer has counted it as dead" in ran.out
    dropped = await cli(staged.run_id, "dead", "drop", "--all", "--yes", "--json")
    assert dropped.code == 0
    assert [fate["outcome"] for fate in dropped.json["fates"]] == ["dropped"]


async def test_results_of_clients_are_listed_and_dropped(cli: Cli, rig: Rig) -> None:
    for name in ("small", "large", "in-work"):
        n = 64 if name == "large" else 1
        job = make_job(rig.run_id, sink=Sink.CLIENT).model_copy(update={"job_id": name, "n": n})
        await rig.submission.submit_client(job, limit=9, caller="alice" if name == "large" else "")
        if name != "in-work":
            await rig.finish(rig.replica("a", clients=True), 1)
    listed = (await cli(rig.run_id, "results", "list", "--json")).json
    assert [job["name"] for job in listed] == ["large", "in-work", "small"]
    assert [job["expires_s"] is None for job in listed] == [False, True, False]
    assert 0 < listed[0]["expires_s"] <= 3600
    (largest,) = (await cli(rig.run_id, "results", "list", "--count", "1", "--json")).json
    assert (largest["name"], largest["caller"]) == ("large", "alice")
    text = (await cli(rig.run_id, "results", "list")).out
    assert re.search(r"large +alice +done +\d+ min +0\.0\d", text)
    assert re.search(r"in-work +- +in work +- +0\.0\d", text)
    assert "name them" in (await cli(rig.run_id, "results", "drop")).err
    (own,) = await rig.submit(1)
    ran = await cli(rig.run_id, "results", "drop", "small", "never", own.job_id, "\udcff")
    assert (ran.code, ran.out.splitlines()[0]) == (1, "1 dropped")
    assert [line.partition(":")[0] for line in ran.out.splitlines()[1:]] == [
        "job 'never'",
        f"job {rig.run_id}",
        "job '\\udcff'",
    ]
    assert (await cli(rig.run_id, "results", "drop", "--all", answer="n\n")).code == 1
    # No job in work is cancelled unless it is named.
    assert (await cli(rig.run_id, "results", "drop", "--all", "--yes", "--json")).json == {"dropped": 1, "left": []}
    assert await rig.length(rig.broker.keys.client_jobs) == 1
    assert (await cli(rig.run_id, "results", "drop", "in-work")).out == "1 dropped\n"
    assert await rig.length(rig.broker.keys.client_jobs) == 0
    assert "nothing is held for clients" in (await cli(rig.run_id, "results", "list")).out


async def test_sessions_are_listed_and_dropped(cli: Cli, rig: Rig) -> None:
    job = await rig.submit_episodes(n=3, idle_s=3600)
    harness = Harness(rig.broker, "sandboxes")
    episodes = [await harness.taken() for _ in range(3)]
    await harness.say(episodes[1], num_tokens=4)
    store = SessionStore(rig.broker)
    for name in ("chat", "another"):
        await store.open(Session(session_id=name, run_id=rig.run_id, idle_s=1800), caller="alice")
    listed = (await cli(rig.run_id, "sessions", "list", "--json")).json
    assert {one["session_id"] for one in listed[:2]} == {"chat", "another"}
    assert {one["episode"] for one in listed[2:]} == {0, 1, 2}
    text = (await cli(rig.run_id, "sessions", "list")).out
    assert re.search(
        rf"{episodes[1].session_id} +sandboxes +1 of train job {job.job_id} +1 +1 +0 +5 +\d+ s +\d+ min", text
    )
    assert re.search(r"chat +alice +- +0 +0 +0 +0 +\d+ s +\d+ min", text)
    assert len((await cli(rig.run_id, "sessions", "list", "--count", "1", "--json")).json) == 1

    gone = await cli(rig.run_id, "sessions", "drop", "chat", "never", episodes[0].session_id)
    assert (gone.code, gone.out.splitlines()[0]) == (1, "2 dropped")
    assert "session 'never': never opened" in gone.out
    again = await harness.taken()
    assert (again.job, again.index) == (job, 0)
    assert (await store.status("another")).turns == 0
    assert await rig.counter("redelivered_episodes") == 0

    assert "--silent-s" in (await cli(rig.run_id, "sessions", "drop")).err
    assert (await cli(rig.run_id, "sessions", "drop", "--silent-s", "60", answer="n\n")).code == 1
    assert (await cli(rig.run_id, "sessions", "drop", "--silent-s", "600", "--yes")).out == "0 dropped\n"
    assert (await cli(rig.run_id, "sessions", "drop", "--silent-s", "0", "--yes", "--json")).json["dropped"] == 3
    assert [one["session_id"] for one in (await cli(rig.run_id, "sessions", "list", "--json")).json] == ["another"]
    status = await cli(rig.run_id, "status")
    assert re.search(r"episodes +3 +0 ", status.out)
    assert "client sessions 1" in status.out
    did = [(change["did"], change["what"]) for change in (await cli(rig.run_id, "audit", "--json")).json]
    assert ("deleted session", "chat") in did
    await store.delete("another")
    assert (await cli(rig.run_id, "sessions", "list")).out == "no session is open\n"


async def test_the_audit_names_this_user_and_outlives_the_run(
    cli: Cli, staged: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert re.search(
        rf"test \(host .*, pid \d+\) +published +{staged.run_id}:7:ab", (await cli(staged.run_id, "audit")).out
    )
    monkeypatch.setenv("LOGNAME", "ali\udcffce")
    for command in (["dead", "drop", "--all", "--yes"], ["drain", "--no-wait", "--reason", "a new disk"], ["open"]):
        assert (await cli(staged.run_id, *command)).code == 0
    assert (await cli(staged.run_id, "purge", "--yes", "--force")).code == 0
    assert (await cli(staged.run_id, "status")).code == 2
    told = (await cli(staged.run_id, "audit", "--json")).json
    assert [change["did"] for change in told] == ["purged", "opened", "closed", "dropped"]
    assert {change["by"] for change in told} == {f"ali?ce@{socket.gethostname()} (dvp-queue)"}
    text = (await cli(staged.run_id, "audit", "--count", "1")).out
    assert re.search(r"20\d\d-\d\d-\d\d .* ali\?ce@.* purged +the run", text)


async def test_pending_names_the_holders(cli: Cli, staged: Rig) -> None:
    rows = (await cli(staged.run_id, "pending", "--json")).json
    assert [row["holder"].partition("/")[0] for row in rows] == ["replica-0"] * 2
    assert rows[0]["job_id"] in (await cli(staged.run_id, "pending")).out
    assert (await cli(staged.run_id, "pending", "--stream", "groups")).out == "nothing is held\n"


async def test_drain_waits_until_the_queue_is_empty(cli: Cli, rig: Rig) -> None:
    await rig.submit(2)
    replica = rig.replica("a")
    leases = await replica.claim(2, BLOCK_MS)
    draining = asyncio.create_task(cli(rig.run_id, "drain", "--reason", "new disks"))
    await until_async(lambda: rig.broker.redis.exists(rig.broker.keys.closed))
    for lease in leases:
        assert not draining.done()
        await replica.commit(lease, make_group(lease.job))
    ran = await draining
    assert (ran.code, ran.out) == (0, "closed, and nothing is queued or running; dvp-queue open admits jobs again\n")
    assert "new disks" in (await cli(rig.run_id, "status")).out
    assert (await cli(rig.run_id, "open")).out == "open again\n"
    assert (await cli(rig.run_id, "open")).out == "was already open\n"


async def test_drain_waits_for_episodes(cli: Cli, rig: Rig) -> None:
    await rig.submit_episodes(n=1)
    harness = Harness(rig.broker)
    ran = await cli(rig.run_id, "drain", "--timeout-s", "0")
    assert "1 episodes are still queued or running after 0 s" in ran.err
    assert "dvp-queue sessions list" in ran.err
    await harness.play(await harness.taken())
    assert (await cli(rig.run_id, "drain")).code == 0


async def test_every_change_can_be_read_by_a_script(cli: Cli, rig: Rig) -> None:
    await rig.submit(1)
    drained = await cli(rig.run_id, "drain", "--no-wait", "--json")
    assert (drained.code, drained.json) == (0, {"closed": True, "empty": None})
    assert (await cli(rig.run_id, "open", "--json")).json == {"closed": False, "was_closed": True}
    assert (await cli(rig.run_id, "purge", "--yes", "--force", "--json")).json == {"run_id": rig.run_id, "removed": 1}


async def test_a_drain_that_takes_too_long_says_who_is_in_the_way(cli: Cli, staged: Rig) -> None:
    ran = await cli(staged.run_id, "drain", "--timeout-s", "0")
    assert ran.code == 2
    assert "6 jobs are still queued or running after 0 s" in ran.err
    assert "dvp-queue open ends the drain" in ran.err
    assert await staged.broker.redis.exists(staged.broker.keys.closed)


async def test_purge_needs_the_name_and_an_idle_run(cli: Cli, staged: Rig) -> None:
    wrong = await cli(staged.run_id, "purge", answer="y\n")
    assert (wrong.code, wrong.out.strip()) == (2, "")
    busy = await cli(staged.run_id, "purge", answer=f"{staged.run_id}\n")
    assert "is being trained by test" in busy.err
    assert await staged.length(staged.broker.keys.dead) == 3
    assert (await cli(staged.run_id, "purge", "--yes", "--force")).out.startswith(f"run {staged.run_id} is gone")
    assert "no such run" in (await cli(staged.run_id, "status")).err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["status"], "this broker knows no such run"),
        (["audit"], "this broker knows no such run"),
        (["dead", "show", "nonsense"], "entry id 'nonsense': expected one like"),
        (["pending", "--after", "nonsense"], "entry id 'nonsense': expected one like"),
        (["dead", "replay"], "name them"),
        (["dead", "drop", "1-1", "--all"], "name them"),
        ([], "no command; see dvp-queue --help"),
    ],
)
async def test_mistakes_are_explained(cli: Cli, rig: Rig, args: list[str], message: str) -> None:
    ran = await cli(rig.run_id if args[:1] in (["dead"], ["pending"]) else f"{rig.run_id}-not", *args)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("dvp-queue: error: ")
    assert message in ran.err


async def test_watching_by_terminal_changes_nothing(cli: Cli, staged: Rig) -> None:
    await close_queue(staged.broker, "still", by="test")
    keys = staged.broker.keys

    async def everything() -> list[Any]:
        redis = staged.broker.redis
        return [await redis.xrange(keys.jobs), await redis.xrange(keys.dead), await redis.hgetall(keys.counters)]

    before = await everything()
    for args in (["status"], ["dead", "list"], ["pending"]):
        assert (await cli(staged.run_id, *args)).code == 0
    assert await everything() == before


def test_nobody_answers_is_one_line_without_a_traceback() -> None:
    command = [sys.executable, "-m", "dvp_rl.monitor.cli", "--redis-url", "redis://:pw@127.0.0.1:1/0", "status"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("dvp-queue: error: Redis at 127.0.0.1:1 does not answer")
    assert "pw" not in done.stderr
    assert "Traceback" not in done.stderr
