"""A caller that takes all it can get must leave room for others, over real sockets."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import httpx
import pytest

from dvp_rl.cancellation import cancel
from dvp_rl.http.api_tokens import Scope
from dvp_rl.rollout.metrics import Metrics
from dvp_rl.transport.broker import Broker
from tests.kit import web
from tests.kit.replicas import ReplicaThread
from tests.kit.tokens import write_token
from tests.kit.wait import WITHIN_S, until_async

MOST = 16
"""The limit of each resource under test."""
FOR_EVER_S = 3600.0
NAMES = ("alice", "bob", "carol")

Asked = asyncio.Task[httpx.Response]


class Callers:
    """Named callers and an operator, at a replica that never finishes a sample."""

    def __init__(self, folder: Path, made: list[Metrics]) -> None:
        self._made = made
        self._tokens = {name: write_token(folder, Scope.ROLLOUT, name) for name in NAMES}
        self._tokens["operator"] = write_token(folder, Scope.OPERATE, "operator")
        self.url = ""
        self.waiting: list[Asked] = []

    def headers(self, name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._tokens[name]}"}

    async def ask(self, name: str, method: str, path: str, **body: object) -> httpx.Response:
        bounds = httpx.Timeout(FOR_EVER_S, connect=WITHIN_S)
        async with httpx.AsyncClient(base_url=self.url, headers=self.headers(name), timeout=bounds) as client:
            return await client.request(method, path, json=body or None)

    async def take_all(self, name: str) -> tuple[int, str]:
        """How many requests for a sample were admitted before one was refused, and why it was."""
        for taken in range(10 * MOST):
            before = self.in_flight
            asked = asyncio.create_task(self.ask(name, "POST", "/v1/rollouts", prompt="1"))
            self.waiting.append(asked)
            await until_async(partial(self._settled, asked, before))
            if asked.done():
                assert (asked.result().status_code, asked.result().headers["retry-after"]) == (429, "1")
                return taken, asked.result().json()["detail"]
        raise AssertionError("never refused")

    async def submit_all(self, name: str) -> tuple[list[str], str]:
        """The ids of the jobs that were admitted before one was refused, and why it was."""
        ids: list[str] = []
        while (answer := await self.ask(name, "POST", "/v1/jobs", prompt="1")).status_code == 202:
            ids.append(answer.json()["job_id"])
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
        return ids, answer.json()["detail"]

    def _settled(self, asked: Asked, before: float) -> bool:
        return asked.done() or self.in_flight > before

    @property
    def in_flight(self) -> float:
        """Samples in flight. Not read over HTTP, as that would be a request, too."""
        (metrics,) = self._made
        return metrics.registry.get_sample_value("dvp_rollout_in_flight_samples") or 0.0


Start = Callable[..., Callers]


@pytest.fixture
async def start(
    model: Path, broker: Broker, broker_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Start]:
    made: list[Metrics] = []

    class Known(Metrics):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr("dvp_rl.rollout.service.Metrics", Known)
    async with AsyncExitStack() as stack:

        def start(*limits: str) -> Callers:
            callers = Callers(tmp_path / "tokens", made)
            args = ["--model", str(model), "--engine", "fake", "--fake.service-time-s", str(FOR_EVER_S)]
            args += ["--redis-url", broker_url, "--run-id", broker.run_id, "--drain-s", "0", *limits]
            args += ["--token-folder", str(tmp_path / "tokens")]
            replica = stack.enter_context(ReplicaThread(tmp_path / "replica", *args))
            stack.push_async_callback(lambda: cancel(callers.waiting))
            callers.url = replica.url
            return callers

        yield start


@pytest.fixture
async def broker(broker_url: str) -> AsyncIterator[Broker]:
    async with await Broker.connect(broker_url, f"callers-{secrets.token_hex(6)}") as broker:
        yield broker


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (
            ("--max-requests", str(MOST)),
            "8 requests are being answered, at most 16 (max_requests); 8 are of alice: nobody takes more",
        ),
        (
            ("--max-batch", "4", "--max-waiting", str(MOST - 4)),
            "8 samples of requests of alice are in flight on this replica and 1 more would leave room for 7 of 16, "
            "4 that generate and 12 that wait (max_waiting); nobody",
        ),
    ],
)
async def test_who_asks_for_all_samples_leaves_half(start: Start, limits: tuple[str, ...], reason: str) -> None:
    callers = start(*limits)
    taken, detail = await callers.take_all("alice")
    assert taken == MOST // 2
    assert detail.startswith(reason)
    assert [(await callers.take_all(name))[0] for name in ("bob", "carol")] == [4, 2]
    expected = 429 if limits[0] == "--max-requests" else 200
    assert [(await callers.ask(name, "GET", "/v1/weights")).status_code for name in NAMES] == [expected] * 3
    assert (await callers.ask("operator", "GET", "/v1/weights")).status_code == 200
    # Callers that leave make room.
    await cancel(callers.waiting)
    await until_async(lambda: callers.in_flight == 0)
    assert (await callers.take_all("bob"))[0] == MOST // 2


async def test_who_submits_all_jobs_leaves_half_of_the_queue(start: Start) -> None:
    callers = start("--max-queued", str(MOST), "--max-batch", "1")
    first = (await callers.ask("alice", "POST", "/v1/jobs", prompt="1", job_id="running")).json()["job_id"]

    async def runs() -> bool:
        return (await callers.ask("alice", "GET", f"/v1/jobs/{first}")).json()["status"] == "running"

    await until_async(runs)
    ids, detail = await callers.submit_all("alice")
    assert len(ids) == 8
    assert detail.startswith(
        "8 jobs of alice wait for a replica, and 8 places of 16 (max_queued) are free: nobody takes more"
    )
    (bobs, _), (carols, _) = await callers.submit_all("bob"), await callers.submit_all("carol")
    assert (len(bobs), len(carols)) == (4, 2)
    # Callers see and delete only their own jobs, an operator all of them.
    path = f"/v1/jobs/{bobs[0]}"
    for method in ("GET", "DELETE"):
        assert (await callers.ask("alice", method, path)).status_code == 404
    answer = await callers.ask("alice", "POST", "/v1/jobs", prompt="1", job_id=bobs[0])
    assert (answer.status_code, answer.json()["detail"]) == (422, f"job {bobs[0]} is another caller's")
    for name in ("bob", "operator"):
        assert (await callers.ask(name, "GET", path)).json()["status"] == "queued"
    assert (await callers.ask("operator", "DELETE", path)).json()["status"] == "queued"
    assert (await callers.ask("bob", "GET", path)).status_code == 404
    assert len((await callers.submit_all("operator"))[0]) == 3
    assert web.get(f"{callers.url}/readyz").status_code == 200
