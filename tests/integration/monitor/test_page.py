"""The monitor over a real socket: events, letters, metrics, access control."""

from __future__ import annotations

import asyncio
import base64
import re
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dvp_rl.cancellation import cancel
from dvp_rl.contract.errors import ConfigError
from dvp_rl.http.api_tokens import Scope
from dvp_rl.monitor.app import PAGE_PARTS
from dvp_rl.monitor.bodies import Completions, CompletionSteps, Curves, LetterPage, Picture
from dvp_rl.monitor.poller import Poller
from dvp_rl.monitor.runs import Runs
from dvp_rl.monitor.settings import MonitorSettings
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.groups import GroupQueue
from dvp_rl.transport.health import queue_health
from dvp_rl.transport.lease import TrainerLease
from dvp_rl.transport.roles import Role
from dvp_rl.transport.submission import Submission
from tests.integration.monitor.process import Monitor, stage, write_metrics
from tests.integration.transport.rig import Harness, Rig
from tests.kit import web
from tests.kit.records import write_completions
from tests.kit.tokens import TOKEN, write_token
from tests.kit.wait import WITHIN_S, until_async
from tests.kit.web import problem

READS = ["/", "/page/page.css", "/page/page.js", "/v1/events", "/v1/queue", "/v1/dead", "/metrics", "/openapi.json"]


def pictures(events: Iterator[tuple[str, Any]]) -> Iterator[Picture]:
    return (Picture.model_validate(content) for kind, content in events if kind == "picture")


async def test_events_tell_what_queue_health_says(staged: Rig, broker_url: str, tmp_path: Path) -> None:
    expected = await queue_health(staged.broker)

    def watch() -> None:
        with Monitor(tmp_path, broker_url, staged.run_id) as monitor, monitor.events() as events:
            picture = next(picture for picture in pictures(events) if not picture.error)
            assert picture.health is not None
            assert (picture.health.verdict, picture.health.reasons) == (expected.verdict, expected.reasons)
            assert (picture.newest_version, picture.min_seq) == (f"{staged.run_id}:7:ab", 7)
            assert [letter.deliveries for letter in picture.letters.letters] == [1, 1, 1]
            assert monitor.get("/v1/queue").json()["verdict"] == expected.verdict

    await asyncio.to_thread(watch)


async def test_it_is_ready_once_it_can_answer(staged: Rig, broker_url: str) -> None:
    runs = Runs(MonitorSettings.load([f"--redis-url={broker_url}", f"--run-id={staged.run_id}"]))
    polling, poller = asyncio.create_task(runs.run()), runs.own
    try:
        async with asyncio.timeout(WITHIN_S):
            while poller.snapshot is None:  # noqa: ASYNC110  # looks at every turn of the event loop
                await asyncio.sleep(0)
        assert poller.picture.health is not None
    finally:
        await cancel([polling])


async def test_a_user_who_may_not_do_what_it_does_is_named(shared_broker: EmbeddedBroker, run_id: str) -> None:
    runs = Runs(MonitorSettings.load([f"--redis-url={shared_broker.url_of(Role.ROLLOUT)}", f"--run-id={run_id}"]))
    polling = asyncio.create_task(runs.run())
    try:
        await until_async(lambda: "of the commands of role monitor" in runs.own.picture.error)
    finally:
        await cancel([polling])


async def test_rates_follow_the_counters(rig: Rig, broker_url: str, tmp_path: Path) -> None:
    with Monitor(tmp_path, broker_url, rig.run_id) as monitor, monitor.events() as events:
        seen = pictures(events)
        await asyncio.to_thread(next, seen)
        await asyncio.to_thread(next, seen)
        await rig.submit(5)
        rising = await asyncio.to_thread(lambda: next(p for p in seen if p.rates.get("submitted")))
        assert rising.rates["submitted"] > 0


async def test_letters_are_paged_replayed_and_dropped_with_the_token(
    staged: Rig, broker_url: str, tmp_path: Path
) -> None:
    def mend() -> None:
        with Monitor(tmp_path, broker_url, staged.run_id, token=TOKEN) as monitor:
            monitor.until_ready()
            first = LetterPage.model_validate(monitor.get("/v1/dead?count=2").json())
            assert first.next is not None
            rest = LetterPage.model_validate(monitor.get(f"/v1/dead?count=2&before={first.next}").json())
            ids = [letter.entry_id for letter in first.letters + rest.letters]
            assert (len(set(ids)), rest.next) == (3, None)
            assert monitor.post("/v1/dead/replay", {"entry_ids": ids[:1]}).json()["fates"][0]["outcome"] == "replayed"
            fates = monitor.post("/v1/dead/replay", {"entry_ids": ids[:2]}).json()["fates"]
            assert [fate["outcome"] for fate in fates] == ["gone", "replayed"]
            assert fates[0]["detail"] == "replayed or dropped before"
            fates = monitor.post("/v1/dead/drop", {"entry_ids": ids}).json()["fates"]
            assert [fate["outcome"] for fate in fates] == ["gone", "gone", "dropped"]
            told = [(change["by"], change["did"]) for change in monitor.get("/v1/audit").json()["changes"]]
            assert told[:2] == [("operate/token (dvp-monitor)", did) for did in ("dropped", "replayed")]

    await asyncio.to_thread(mend)
    assert await staged.counter("replayed") == 2


async def test_without_a_token_it_only_watches(staged: Rig, broker_url: str, tmp_path: Path) -> None:
    def refused() -> None:
        with Monitor(tmp_path, broker_url, staged.run_id) as monitor:
            monitor.until_ready()
            for verb in ("replay", "drop"):
                answer = monitor.post(f"/v1/dead/{verb}", {"entry_ids": ["1-1"]})
                assert "needs a token of scope operate; this service has no tokens" in problem(answer, 403).detail
            for path in READS:
                with web.stream("GET", monitor.url + path, headers={"Host": "evil.example"}) as response:
                    assert response.status_code == 403, path

    await asyncio.to_thread(refused)
    assert await staged.length(staged.broker.keys.dead) == 3


def test_a_token_protects_everything(broker_url: str, run_id: str, tmp_path: Path) -> None:
    with Monitor(tmp_path, broker_url, run_id, token=TOKEN) as monitor:
        monitor.until_ready()
        for path in READS:
            refused = web.get(monitor.url + path)
            assert "needs a token" in problem(refused, 401).detail
            # A browser shows its own login dialog, and sends what the user enters as Basic.
            assert refused.headers["www-authenticate"] == 'Basic realm="dvp-monitor"'
        for verb in ("replay", "drop"):
            problem(web.post(f"{monitor.url}/v1/dead/{verb}", json={"entry_ids": ["1-1"]}), 401)
        for user, password, status in (("operator", TOKEN, 200), ("", TOKEN, 200), (TOKEN, "", 401), ("a", "b", 401)):
            assert web.get(f"{monitor.url}/v1/queue", auth=(user, password)).status_code == status
        for damaged in ("Basic", "Basic ???", f"Basic {base64.b64encode(b'no colon').decode()}", "Basic é"):
            headers = {"Authorization": damaged.encode()}
            assert web.get(f"{monitor.url}/v1/queue", headers=headers).status_code == 401
        assert web.get(f"{monitor.url}/healthz").status_code == 200
        # What another site's form could send with the browser's stored password.
        form = web.post(f"{monitor.url}/v1/dead/drop", content='{"entry_ids": ["1-1"]}', auth=("", TOKEN))
        assert form.status_code == 415


async def test_readers_watch_until_their_token_is_gone(staged: Rig, broker_url: str, tmp_path: Path) -> None:
    reader = write_token(tmp_path / "tokens", Scope.READ, "reader")
    write_token(tmp_path / "tokens", Scope.OPERATE, "operator")

    def watch() -> None:
        options = (f"--token-folder={tmp_path / 'tokens'}",)
        with Monitor(tmp_path, broker_url, staged.run_id, *options, bearer=reader) as monitor:
            monitor.until_ready()
            assert monitor.get("/v1/caller").json() == {"name": "reader", "scope": "read"}
            refused = monitor.post("/v1/dead/drop", {"entry_ids": ["1-1"]})
            detail = "POST /v1/dead/drop needs a token of scope operate; that of reader has scope read"
            assert problem(refused, 403).detail == detail
            with monitor.events() as events:
                next(pictures(events))
                (tmp_path / "tokens" / "read" / "reader").unlink()
                deque(events, maxlen=0)  # to the end
            problem(monitor.get("/v1/queue"), 401)

    await asyncio.to_thread(watch)
    assert await staged.length(staged.broker.keys.dead) == 3


def test_the_page_needs_nothing_from_elsewhere(broker_url: str, run_id: str, tmp_path: Path) -> None:
    with Monitor(tmp_path, broker_url, run_id) as monitor:
        for path in ("/", *(f"/page/{name}" for name in PAGE_PARTS)):
            response = monitor.get(path)
            assert "default-src 'none'" in response.headers["content-security-policy"]
            assert response.headers["x-content-type-options"] == "nosniff"
            outside = response.text.replace("http://www.w3.org/2000/svg", "")
            assert "http://" not in outside
            assert "https://" not in outside


@pytest.mark.parametrize(
    ("body", "allowed"),
    [
        ({"entry_ids": []}, "list of 1 to 1000 items"),
        ({"entry_ids": ["x"]}, "string like"),
        ({"entry_ids": ["1-1"], "all": True}, "only the fields entry_ids"),
        ({}, "list of 1 to 1000 items"),
    ],
)
def test_bad_selections_are_named(body: Any, allowed: str, broker_url: str, run_id: str, tmp_path: Path) -> None:
    with Monitor(tmp_path, broker_url, run_id, token=TOKEN) as monitor:
        monitor.until_ready()
        assert allowed in problem(monitor.post("/v1/dead/drop", body), 422).errors[0].allowed
        problem(monitor.get("/v1/dead?before=x"), 422)


async def test_metrics_tell_the_same(staged: Rig, broker_url: str, tmp_path: Path) -> None:
    def scrape() -> dict[str, float]:
        with Monitor(tmp_path, broker_url, staged.run_id) as monitor:
            monitor.until_ready()
            families = list(text_string_to_metric_families(monitor.get("/metrics").text))
        assert all(family.name.startswith("dvp_queue_") and family.documentation for family in families)
        samples = [sample for family in families for sample in family.samples]
        return {".".join([sample.name, *sample.labels.values()]): sample.value for sample in samples}

    metrics = await asyncio.to_thread(scrape)
    expected = {
        "dvp_queue_up": 1,
        "dvp_queue_backlog.jobs": 4,
        "dvp_queue_pending.jobs": 2,
        "dvp_queue_backlog.groups": 5,
        "dvp_queue_in_flight_jobs": 8,
        "dvp_queue_dead_letters": 3,
        "dvp_queue_jobs_total.submitted": 11,
        "dvp_queue_jobs_total.dead": 3,
        "dvp_queue_replicas.serving": 3,
        "dvp_queue_replicas.lost": 0,
        "dvp_queue_replica_lag_versions_max": 1,
        "dvp_queue_trainer_step": 42,
        "dvp_queue_verdict.replicas_behind": 1,
        "dvp_queue_verdict.dead_letters": 0,
        "dvp_queue_reason.dead_letters": 1,
        "dvp_queue_reason.stalled": 0,
    }
    assert {name: metrics[name] for name in expected} == expected
    assert metrics["dvp_queue_broker_memory_used_bytes"] > 0


async def test_metrics_tell_of_episodes(rig: Rig, broker_url: str, tmp_path: Path) -> None:
    def scrape() -> str:
        with Monitor(tmp_path, broker_url, rig.run_id) as monitor:
            monitor.until_ready()
            return monitor.get("/metrics").text

    assert 'stream="episodes"' not in await asyncio.to_thread(scrape)
    await rig.submit_episodes(n=3)
    await Harness(rig.broker).taken()
    found = await asyncio.to_thread(scrape)
    for line in ('backlog{stream="episodes"} 2.0', 'pending{stream="episodes"} 1.0', "client_sessions 0.0"):
        assert f"\ndvp_queue_{line}\n" in found
    assert re.search(r"^dvp_queue_episode_silent_seconds \d+\.\d+$", found, re.MULTILINE)


def test_an_outage_is_told_and_survived(own_broker: EmbeddedBroker, run_id: str, tmp_path: Path) -> None:
    own_broker.stop()
    with Monitor(tmp_path, own_broker.url, run_id) as monitor:
        with monitor.events() as events:
            seen = pictures(events)
            assert "does not answer" in next(picture for picture in seen if "127.0.0.1" in picture.error).error
            assert "does not answer" in problem(monitor.get("/v1/queue"), 503).detail
            assert monitor.get("/readyz").status_code == 503
            assert "dvp_queue_up 0.0" in monitor.get("/metrics").text
            own_broker.start()
            assert next(picture for picture in seen if not picture.error).health is not None
        assert monitor.get("/readyz").status_code == 200


async def test_the_broker_does_not_feel_the_viewers(
    own_broker: EmbeddedBroker, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, look = 0, Poller.look

    async def counted(poller: Poller) -> None:
        nonlocal looks
        await look(poller)
        looks += 1

    monkeypatch.setattr(Poller, "look", counted)
    async with await Broker.connect(own_broker.url, run_id) as broker:
        fence = await TrainerLease(broker, "test").acquire()
        await stage(Rig(broker, fence, Submission(broker), GroupQueue(broker, fence=fence)), num_replicas=200)

        async def commands_per_look() -> float:
            commands, looked = await _commands(broker), looks
            await until_async(lambda: looks >= looked + 20)
            return (await _commands(broker) - commands) / (looks - looked)

        with Monitor(tmp_path, own_broker.url, run_id) as monitor, monitor.events() as events:
            await asyncio.to_thread(next, events)
            alone = await commands_per_look()
            with ExitStack() as stack:
                crowd = [stack.enter_context(monitor.events()) for _ in range(20)]
                readers = [threading.Thread(target=lambda e=events: [next(e) for _ in range(10)]) for events in crowd]
                for reader in readers:
                    reader.start()
                watched = await commands_per_look()
                for reader in readers:
                    await asyncio.to_thread(reader.join)
    # If each viewer cost the broker anything, twenty would cost twenty times as much; both counts may be off by one
    # poll.
    assert watched < 2 * alone


async def _commands(broker: Broker) -> int:
    return int((await broker.redis.info("stats"))["total_commands_processed"])


def test_too_many_viewers_are_told(broker_url: str, run_id: str, tmp_path: Path) -> None:
    with Monitor(tmp_path, broker_url, run_id, "--max-viewers", "1") as monitor, monitor.events() as events:
        next(events)
        refused = monitor.get("/v1/events")
        assert "1 viewers are watching already (max_viewers)" in problem(refused, 429).detail
        assert refused.headers["retry-after"] == "10"


def test_curves_come_and_grow(broker_url: str, run_id: str, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    with Monitor(tmp_path, broker_url, run_id, "--metrics-file", str(metrics)) as monitor, monitor.events() as events:
        curves = (Curves.model_validate(content) for kind, content in events if kind == "curves")
        assert "No such file" in next(curves).error
        write_metrics(metrics, 3)
        panels = {panel.title: panel for panel in next(c for c in curves if c.panels).panels}
        assert set(panels) >= {"Reward", "Veto", "Importance masking", "Kept mass"}
        assert [line.label for line in panels["Veto"].lines] == ["outside the safe set", "numerical"]
        assert [step for step, _ in panels["Reward"].lines[0].points] == [0, 1, 2]
        assert panels["Kept mass"].unit == "probability"
        with metrics.open("a") as file:
            file.write('{"step": 3, "reward/mean": 0.75}\n{"step": 4, "reward/')
        grown = next(curves)
        assert grown.panels[0].lines[0].points[-1] == (3, 0.75)
        assert grown.error == ""


def test_only_loopback_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"token_folder, set a token in the environment \(DVP_MONITOR__TOKEN\)"):
        MonitorSettings.load(["--host", "0.0.0.0"])
    monkeypatch.setenv("DVP_MONITOR__TOKEN", TOKEN)
    caller = MonitorSettings.load(["--host", "0.0.0.0"]).tokens().find(TOKEN.encode())
    assert caller is not None
    assert caller.scope is Scope.OPERATE


def test_completions_are_only_shown_if_they_are_asked_for(broker_url: str, run_id: str, tmp_path: Path) -> None:
    with Monitor(tmp_path, broker_url, run_id, "--metrics-file", str(tmp_path / "metrics.jsonl")) as monitor:
        assert "completions_file" in problem(monitor.get("/v1/completions"), 404).detail


def test_completions_come_and_grow(broker_url: str, run_id: str, tmp_path: Path) -> None:
    file = tmp_path / "completions.jsonl"
    with Monitor(tmp_path, broker_url, run_id, "--completions-file", str(file)) as monitor, monitor.events() as events:
        steps = (CompletionSteps.model_validate(content) for kind, content in events if kind == "completions")
        assert "No such file" in next(steps).error
        assert "no completions have been read yet" in problem(monitor.get("/v1/completions"), 404).detail
        write_completions(file, [1])
        assert next(steps).steps == (1,)
        write_completions(file, [1, 11])
        assert next(steps).steps == (1, 11)
        newest = Completions.model_validate(monitor.get("/v1/completions").json())
        assert newest.step == 11
        assert newest.completions[0].pieces == (("The ", 0), ("sum ", 1), ("of step ", 2), ("11 is ", 3), ("95", -1))
        older = Completions.model_validate(monitor.get("/v1/completions?step=1").json())
        assert older.completions[0].pieces[-2] == ("1 is ", 3)
        assert "newest are of step 11" in problem(monitor.get("/v1/completions?step=2"), 404).detail
