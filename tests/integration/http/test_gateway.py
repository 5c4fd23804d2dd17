"""The gateway of the deployment, in front of a real replica or of none."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from dvp_rl.cancellation import cancel
from dvp_rl.client import AsyncClient, Client, Retry
from dvp_rl.contract.errors import UnavailableError
from tests.kit import web
from tests.kit.gateway import gateway, needs_haproxy
from tests.kit.ports import free_port
from tests.kit.replicas import ReplicaProcess
from tests.kit.tokens import TOKEN
from tests.kit.wait import WITHIN_S, until
from tests.kit.web import problem

pytestmark = needs_haproxy


def test_without_a_replica_it_says_so(tmp_path: Path) -> None:
    with gateway(tmp_path, free_port()) as url:
        until(lambda: web.get(f"{url}/v1/weights").status_code == 503, "the gateway misses its replica")
        for path in ("/v1/rollouts", "/v1/chat/completions", "/nothing", "/gateway"):
            refused = web.get(url + path)
            assert problem(refused, 503).detail.startswith("no replica is ready")
            assert refused.headers["retry-after"] == "1"
        with Client(url, retry=Retry(tries=1)) as client, pytest.raises(UnavailableError, match="no replica is ready"):
            client.rollout(prompt="1")


def test_with_a_replica_unknown_paths_are_answered_with_its_hints(small_model: Path, tmp_path: Path) -> None:
    """Health checks reach replicas under a foreign Host, so that only those with tokens answer them."""
    args = ("--model", str(small_model), "--engine", "fake", "--fake.service-time-s", "0", "--fake.num-tokens", "2")
    with (
        ReplicaProcess(tmp_path / "replica", *args, token=TOKEN, variables={"DVP_ROLLOUT__TOKEN": TOKEN}) as replica,
        gateway(tmp_path, replica.port) as url,
        httpx.Client(base_url=url, auth=("", TOKEN), trust_env=False, timeout=WITHIN_S) as client,
    ):
        until(lambda: client.get("/gateway").status_code == 200, "the gateway has found its replica")
        assert client.post("/v1/rollouts", json={"prompt": "1"}).status_code == 200
        refused = problem(client.post("/v1/chat/completions", json={}), 404)
        assert "POST /v1/rollouts takes" in refused.detail
        assert client.get("/docs").status_code == 200


async def test_a_client_that_is_gone_costs_its_replica_nothing_more(small_model: Path, tmp_path: Path) -> None:
    args = ("--model", str(small_model), "--engine", "fake", "--fake.service-time-s", "600")
    with (
        ReplicaProcess(tmp_path / "replica", *args, token=TOKEN, variables={"DVP_ROLLOUT__TOKEN": TOKEN}) as replica,
        gateway(tmp_path, replica.port) as url,
    ):
        until(lambda: web.get(f"{url}/gateway").status_code == 200, "the gateway has found its replica")
        async with AsyncClient(url, token=TOKEN) as client:
            asking = asyncio.create_task(client.rollout(prompt="1"))
            await asyncio.to_thread(until, lambda: replica.in_flight() == 1)
            await cancel([asking])
        until(lambda: replica.in_flight() == 0, "it stops")
