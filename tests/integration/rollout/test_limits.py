"""Every limit over HTTP: 429 with Retry-After and the reason if it is about load, else 422 that names the field."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from redis import Redis

from dvp_rl.contract.http import Problem
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.runs import close_queue, open_queue
from tests.kit import web
from tests.kit.replicas import ReplicaThread
from tests.kit.wait import until

RUN_ID, QUEUED = "limits", 2


@pytest.fixture
def busy_replica(model: Path, own_broker: EmbeddedBroker, tmp_path: Path) -> Iterator[ReplicaThread]:
    """A replica that one job fills for good; two more may wait in the queue, and two requests may be in flight."""
    args = ["--model", str(model), "--engine", "fake", "--fake.service-time-s", "600", "--max-context", "8192"]
    args += ["--max-batch", "1", "--max-queued", str(QUEUED), "--max-requests", "2", "--drain-s", "0"]
    args += ["--redis-url", own_broker.url, "--run-id", RUN_ID]
    with ReplicaThread(tmp_path / "replica", *args) as replica:
        yield replica


def submit(replica: ReplicaThread, name: str) -> httpx.Response:
    return web.post(f"{replica.url}/v1/jobs", json={"prompt": "1", "job_id": name})


def reason(refused: httpx.Response) -> str:
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    return Problem.model_validate_json(refused.content).detail


def test_a_queue_that_takes_no_more_says_why(busy_replica: ReplicaThread, own_broker: EmbeddedBroker) -> None:
    async def drain(closed: bool) -> None:
        async with await Broker.connect(own_broker.url, RUN_ID) as broker:
            await (close_queue(broker, "test", by="test") if closed else open_queue(broker, by="test"))

    status = f"{busy_replica.url}/v1/jobs/running"
    assert submit(busy_replica, "running").status_code == 202
    until(lambda: web.get(status).json()["status"] == "running")
    for i in range(QUEUED):
        assert submit(busy_replica, f"waiting-{i}").status_code == 202
    full = f"{QUEUED} jobs already wait for a replica, the most that max_queued allows"
    assert reason(submit(busy_replica, "more")) == full
    assert submit(busy_replica, "waiting-0").status_code == 202

    with Redis.from_url(own_broker.url) as redis:
        redis.config_set("maxmemory", int(redis.info("memory")["used_memory"] / 0.85))
        full = "the broker's memory (its maxmemory) would be 50% full, the rest is for training"
        assert reason(submit(busy_replica, "more")) == full
        redis.config_set("maxmemory", 0)

    asyncio.run(drain(closed=True))
    assert "being drained" in reason(submit(busy_replica, "more"))
    asyncio.run(drain(closed=False))
    assert "already wait" in reason(submit(busy_replica, "more"))


def test_requests_at_the_same_time_are_bounded_and_probes_are_not(busy_replica: ReplicaThread) -> None:
    """Requests whose body never arrives hold their place until they disconnect."""
    ask, probe = f"{busy_replica.url}/v1/weights", f"{busy_replica.url}/healthz"
    unfinished = b"POST /v1/rollouts HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{"
    with ExitStack() as stack:
        for _ in range(2):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", busy_replica.port)))
            connection.sendall(unfinished)
        until(lambda: web.get(ask).status_code == 429)
        assert reason(web.get(ask)) == "2 requests are being answered, at most 2 (max_requests)"
        assert web.get(probe).status_code == 200
    until(lambda: web.get(ask).status_code == 200)


@pytest.mark.parametrize("path", ["/v1/rollouts", "/v1/jobs"])
def test_a_group_that_would_be_too_large_is_refused(path: str, busy_replica: ReplicaThread) -> None:
    body = {"prompt_ids": [5] * 192, "n": 1024, "sampling": {"max_tokens": 10_000}}
    refused = web.post(busy_replica.url + path, json=body)
    assert refused.status_code == 422
    (error,) = Problem.model_validate_json(refused.content).errors
    assert (error.field, error.value) == ("n", 1024)
    # 8192 tokens of context less 192 of the prompt leave 8000.
    assert "at most 524 samples of up to 8000 tokens, 4194304 together" in error.allowed
