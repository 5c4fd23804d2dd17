"""Episodes of a training run over HTTP: taken, played through an OpenAI endpoint, finished, given back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from dvp_rl.contract.group import DeadLetter, Group
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.results import client_jobs
from dvp_rl.transport.sessions import SessionStore
from tests.integration.engines.oracle import Oracle
from tests.integration.rollout.test_sessions import check_logprobs, examples
from tests.integration.transport.rig import BLOCK_MS, Rig
from tests.kit import web
from tests.kit.harness import Harness
from tests.kit.records import make_episodes
from tests.kit.replicas import ReplicaProcess, ReplicaThread
from tests.kit.wait import WITHIN_S, until_async


@pytest.fixture
async def rig(broker: Broker) -> Rig:
    return await Rig.of(broker)


async def receive(rig: Rig) -> Group | DeadLetter:
    (delivery,) = await until_async(lambda: rig.groups.read(9, BLOCK_MS))
    return delivery.item


@pytest.fixture
def args(model: Path, broker_url: str, run_id: str) -> list[str]:
    return ["--model", str(model), "--redis-url", broker_url, "--run-id", run_id]


class Caller:
    """Calls of a harness; each blocks."""

    def __init__(self, url: str, token: str = "none") -> None:
        headers = {"Authorization": f"Bearer {token}"}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=WITHIN_S, trust_env=False)

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def ask(self, wait_s: float = 0, **headers: str) -> httpx.Response:
        return self._http.post("/v1/episodes", json={"wait_s": wait_s}, headers=headers)

    def take(self, **headers: str) -> dict[str, Any]:
        answer = self.ask(WITHIN_S / 10, **headers)
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    def say(self, session_id: str, *, key: str = "", **fields: Any) -> httpx.Response:
        model = self._http.get(f"/v1/sessions/{session_id}/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": "1+1="} | fields
        headers = {"Idempotency-Key": key} if key else {}
        return self._http.post(f"/v1/sessions/{session_id}/v1/completions", json=body, headers=headers)

    def finish(self, session_id: str, **body: Any) -> httpx.Response:
        return self._http.post(f"/v1/sessions/{session_id}/finish", json=body)

    def status(self, session_id: str) -> httpx.Response:
        return self._http.get(f"/v1/sessions/{session_id}")

    def delete(self, session_id: str, **query: str) -> httpx.Response:
        return self._http.delete(f"/v1/sessions/{session_id}", params=query)

    def open(self) -> httpx.Response:
        return self._http.post("/v1/sessions", json={})


@pytest.fixture
def caller(args: list[str], tmp_path: Path) -> Iterator[Caller]:
    """A caller of a replica with the fake engine."""
    with (
        ReplicaThread(tmp_path, *args, "--engine", "fake", "--max-deliveries", "2") as replica,
        Caller(replica.url) as client,
    ):
        yield client


async def test_an_episode_goes_from_the_trainer_to_the_trainer(
    args: list[str], tmp_path: Path, rig: Rig, model: Path
) -> None:
    sampling = {"max_tokens": 6, "temperature": 0.7, "seed": 4}
    job = await rig.submit_episodes(n=3, task={"prompt": "2+2=", "answer": "4"}, sampling=sampling)
    with ReplicaProcess(tmp_path / "replica", *args, "--threads", "1") as replica:
        harness = Harness(replica.url)
        for _ in range(3):
            assert harness.play_one()
        assert not harness.play_one(wait_s=0)
    found = await receive(rig)
    assert isinstance(found, Group)
    assert (found.job_id, found.rewards, len(found.episodes)) == (job.job_id, (*harness.given,), 3)
    oracle = Oracle(model)
    for (sample,) in found.episodes:
        prompt = sample.continues(found.prompt_ids).tolist()
        check_logprobs(oracle, prompt, sample.model_dump(), temperature=0.7)
        assert len(sample.environment) == 1, "two turns"
    first, second, third = (sample.token_ids.tolist() for sample in found.samples)
    assert first != second != third != first, "each draws from a stream of its own"


async def test_the_example_of_the_readme_plays(args: list[str], tmp_path: Path, rig: Rig) -> None:
    _, _, code = examples()
    await rig.submit_episodes(n=1, task={"prompt": "1+1=", "answer": "2"})
    with ReplicaThread(tmp_path, *args, "--engine", "fake") as replica:
        exec(code.replace("http://127.0.0.1:8000", replica.url), names := dict[str, Any]())
    found = await receive(rig)
    assert isinstance(found, Group)
    assert found.rewards == (names["reward"],)


async def test_what_an_episode_is_told(caller: Caller, rig: Rig) -> None:
    assert caller.ask().status_code == 204
    await rig.submit_episodes(n=2, task={"row": 7, "prompt": "1+1="}, sampling={"max_tokens": 9})
    body = caller.take()
    session_id = body["session_id"]
    assert (body["index"], body["n"], body["sink"], body["task"]) == (0, 2, "train", {"row": 7, "prompt": "1+1="})
    assert body["sampling"]["max_tokens"] == 9
    assert "seed" not in body["sampling"]
    status = caller.status(session_id).json()
    assert (status["state"], status["turns"], status["metadata"]) == ("open", 0, {})
    assert caller.say(session_id, max_tokens=99).json()["usage"]["completion_tokens"] <= 9
    assert "reward" in web.problem(caller.finish(session_id, reward="1"), 422).detail
    assert "a seed of its own" in caller.say(session_id, seed=1).json()["detail"]
    end = {"reward": 0.5, "truncated": True, "metrics": {"tool_errors": 2}}
    ended = caller.finish(session_id, **end).json()
    assert (ended["state"], ended["reward"], ended["turns"], ended["group"]) == ("finished", 0.5, 1, None)
    assert ended["metrics"] == {"tool_errors": 2}
    assert caller.finish(session_id, **end).json() == ended
    for other in ({"reward": 1.0}, {"truncated": False}, {"metrics": {}}):
        detail = web.problem(caller.finish(session_id, **end | other), 422).detail
        assert 'was finished with reward 0.5, as cut off, metrics {"tool_errors": 2.0}' in detail
    assert await client_jobs(rig.broker) == []


@pytest.mark.parametrize(
    ("metrics", "error"),
    [
        ({"Tool errors": 1}, "metrics.Tool errors"),
        ({"x" * 100_000: 1}, f"metrics.{'x' * 100}"),
        ({"wins": "1"}, "metrics.wins"),
        ({"wins": True}, "metrics.wins"),
        ({"wins": 2e15}, "metrics.wins"),
        ({"turns": 3, "drifted": 0}, "allowed: other names than turns, drifted, which the replica counts"),
        ({f"m{i}": 1 for i in range(17)}, "allowed: object of at most 16 fields"),
    ],
)
async def test_metrics_that_are_none_are_refused(caller: Caller, rig: Rig, metrics: dict[str, Any], error: str) -> None:
    await rig.submit_episodes(n=1)
    session_id = caller.take()["session_id"]
    caller.say(session_id)
    refused = caller.finish(session_id, metrics=metrics)
    assert error in str(web.problem(refused, 422))
    assert len(refused.content) < 2_000
    assert caller.finish(session_id).json()["metrics"] == {}


async def test_who_waits_gets_the_next_one(caller: Caller, rig: Rig, run_id: str) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(caller.take)
        await rig.submit_episodes(n=1)
        assert waiting.result()["job_id"] == make_episodes(run_id).job_id


async def test_the_same_key_takes_the_same_episode(caller: Caller, rig: Rig) -> None:
    await rig.submit_episodes(n=2)
    first, again, other = (caller.take(**{"Idempotency-Key": key}) for key in ("a", "a", "b"))
    assert first == again
    assert other["index"] == 1


async def test_turns_at_once_draw_their_own_samples(caller: Caller, rig: Rig) -> None:
    await rig.submit_episodes(n=1, sampling={"max_tokens": 20, "seed": 1})
    session_id = caller.take()["session_id"]
    with ThreadPoolExecutor() as pool:
        said = [answer.json()["choices"][0]["text"] for answer in pool.map(lambda _: caller.say(session_id), range(4))]
    assert len({*said}) == 4


async def test_turns_with_keys_are_drawn_alike_in_another_attempt(caller: Caller, rig: Rig) -> None:
    await rig.submit_episodes(n=1, sampling={"max_tokens": 20, "seed": 1})
    said = []
    for _ in range(2):
        session_id = caller.take()["session_id"]
        said.append([caller.say(session_id, key=key).json()["choices"][0]["text"] for key in ("a", "b")])
        caller.delete(session_id)
    assert said[0] == said[1]
    assert said[0][0] != said[0][1]


async def test_runs_with_the_same_seed_draw_alike(model: Path, broker_url: str, run_id: str, tmp_path: Path) -> None:
    """Turns name the run as their model; the name decides nothing."""
    said = []
    for name in (run_id, f"{run_id}-again"):
        args = ["--model", str(model), "--redis-url", broker_url, "--run-id", name]
        async with await Broker.connect(broker_url, name) as broker:
            await (await Rig.of(broker)).submit_episodes(n=1, sampling={"max_tokens": 20, "seed": 1})
            with ReplicaThread(tmp_path / name, *args) as replica, Caller(replica.url) as caller:
                said.append(caller.say(caller.take()["session_id"], key="a").json()["choices"][0]["text"])
    assert said[0] == said[1]


async def test_an_episode_is_given_back_or_fails(caller: Caller, rig: Rig) -> None:
    await rig.submit_episodes(n=1)
    for _ in range(3):
        assert caller.delete(caller.take()["session_id"]).status_code == 200
    for _ in range(2):
        session_id = caller.take()["session_id"]
        assert caller.say(session_id).status_code == 200
        assert caller.delete(session_id, error="the sandbox does not start").json()["turns"] == 1
    dead = await receive(rig)
    assert isinstance(dead, DeadLetter)
    assert dead.error == "episode 0: the sandbox does not start"
    web.problem(caller.status(session_id), 404)
    assert caller.ask().status_code == 204


async def test_turns_wait_for_the_weights_that_their_job_needs(args: list[str], tmp_path: Path, rig: Rig) -> None:
    with (
        ReplicaThread(tmp_path, *args, "--engine", "fake", "--job-timeout-s", "0.5") as replica,
        Caller(replica.url) as caller,
    ):
        await rig.submit_episodes(n=1, min_seq=5)
        session_id = caller.take()["session_id"]
        assert "took longer than 0 s" in caller.say(session_id).json()["detail"]
        assert caller.status(session_id).json()["turns"] == 0


async def test_only_the_scope_harness_takes_episodes(args: list[str], tmp_path: Path, rig: Rig) -> None:
    for scope, name in (("rollout", "alice"), ("harness", "bob"), ("harness", "carol")):
        (tmp_path / "tokens" / scope).mkdir(parents=True, exist_ok=True)
        (tmp_path / "tokens" / scope / name).write_text(name * 8)
    args = [*args, "--engine", "fake", "--token-folder", str(tmp_path / "tokens")]
    await rig.submit_episodes(n=2)
    with (
        ReplicaThread(tmp_path / "replica", *args, token="alice" * 8) as replica,
        Caller(replica.url, "alice" * 8) as alice,
        Caller(replica.url, "bob" * 8) as bob,
        Caller(replica.url, "carol" * 8) as carol,
    ):
        assert "harness" in web.problem(alice.ask(), 403).detail
        assert alice.open().status_code == 201
        session_id = bob.take()["session_id"]
        for other in (alice, carol):
            web.problem(other.status(session_id), 404)
            web.problem(other.delete(session_id), 404)
        assert carol.take()["index"] == 1
        assert bob.open().status_code == 201, "it includes rollout"


def test_without_a_queue_there_are_no_episodes(model: Path, tmp_path: Path) -> None:
    with ReplicaThread(tmp_path, "--model", str(model), "--engine", "fake") as replica, Caller(replica.url) as caller:
        assert "no job queue" in web.problem(caller.ask(), 503).detail


def test_a_wait_has_a_bound(caller: Caller) -> None:
    assert "60" in web.problem(caller.ask(61), 422).detail


async def test_a_replica_that_stops_gives_no_episode(
    args: list[str], tmp_path: Path, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, take = threading.Event(), SessionStore.take

    async def noticed(self: SessionStore, *given: Any, **options: Any) -> Any:
        looked.set()
        return await take(self, *given, **options)

    monkeypatch.setattr(SessionStore, "take", noticed)
    with (
        ReplicaThread(tmp_path, *args, "--engine", "fake", "--drain-s", "60") as replica,
        Caller(replica.url) as caller,
        ThreadPoolExecutor() as pool,
    ):
        waiting = pool.submit(caller.ask, 60)
        await until_async(looked.is_set)
        await asyncio.to_thread(replica.stop)
        assert waiting.result().status_code == 503
        assert "stopping" in waiting.result().json()["detail"]
