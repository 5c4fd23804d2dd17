"""A real replica with a real server on a real broker: its server is killed, and damaged weights arrive."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from dvp_rl.client import Client
from dvp_rl.contract.errors import UnavailableError
from dvp_rl.contract.group import Group
from dvp_rl.contract.http import ReplicaState
from dvp_rl.contract.job import Job, Sink
from dvp_rl.contract.sampling import Sampling
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.groups import GroupQueue
from dvp_rl.transport.health import queue_health
from dvp_rl.transport.lease import TrainerLease
from dvp_rl.transport.submission import Submission
from tests.integration.rollout.publishing import announce
from tests.integration.rollout.test_session_turns import check_next_turn
from tests.integration.rollout.test_session_versions import check_three_versions
from tests.kit.replicas import ReplicaProcess
from tests.kit.table import check_table
from tests.kit.wait import WITHIN_S, until_async

from .conftest import ENDLESS
from .oracle import Oracle
from .servers import sglang_python, vllm_python
from .sglang_routes import answers

pytestmark = pytest.mark.slow

PYTHONS = {"sglang": sglang_python, "vllm": vllm_python}
NUM_JOBS = 48
OPEN = {"`GET /health`", "`GET /health_generate`", "`GET /ready`"}
"""Calls that SGLang answers without a key and that reveal only that it runs."""


@pytest.fixture(scope="module", params=PYTHONS)
def kind(request: pytest.FixtureRequest) -> str:
    """The replica's engine, and the name of its run."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def replica(
    kind: str, folders: dict[str, Path], broker_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ReplicaProcess]:
    folder = tmp_path_factory.mktemp("replica")
    args = ["--model", str(folders["even"]), "--engine", kind, f"--{kind}.python", str(PYTHONS[kind]())]
    args += ["--redis-url", broker_url, "--run-id", kind, "--replica-id", "r", "--threads", "1", "--max-batch", "16"]
    args += [f"--{kind}.log-file", str(folder / "server.log"), "--lease-s", "5"]
    with ReplicaProcess(folder, *args) as process:
        yield process


@pytest.fixture
async def broker(kind: str, broker_url: str) -> AsyncIterator[Broker]:
    async with await Broker.connect(broker_url, kind) as connected:
        yield connected


@pytest.fixture
async def fence(broker: Broker) -> AsyncIterator[int]:
    lease = TrainerLease(broker, "test")
    yield await lease.acquire()
    await lease.release()


def server_processes(replica: ReplicaProcess) -> list[psutil.Process]:
    """The server, followed by the processes that it started."""
    (server,) = psutil.Process(replica.pid).children()
    return [server, *server.children(recursive=True)]


async def until_state(broker: Broker, wanted: ReplicaState) -> None:
    async def reached() -> bool:
        return [r.state for r in (await queue_health(broker)).replicas] == [wanted]

    await until_async(reached)


async def until_serving(client: Client, version: str) -> None:
    async def reached() -> bool:
        return (await asyncio.to_thread(client.weights)).version == version

    await until_async(reached)


async def collect(broker: Broker, fence: int, count: int) -> dict[str, Group]:
    trainer, groups = GroupQueue(broker, fence=fence), {}
    async with asyncio.timeout(WITHIN_S):
        while len(groups) < count:
            for delivery in await trainer.read(100, 500):
                assert isinstance(delivery.item, Group), delivery.item
                assert delivery.job_id not in groups
                groups[delivery.job_id] = delivery.item
    return groups


def jobs(run_id: str) -> list[Job]:
    sampling = Sampling(max_tokens=300, log_min_p=-6.0)
    return [
        Job(job_id=f"kill-{i}", run_id=run_id, prompt_ids=[5, 6, 7 + i], n=2, sampling=sampling, sink=Sink.TRAIN)
        for i in range(NUM_JOBS)
    ]


async def test_a_killed_server_loses_no_job_and_mislabels_no_token(
    replica: ReplicaProcess,
    broker: Broker,
    fence: int,
    folders: dict[str, Path],
    oracles: dict[str, Oracle],
    tmp_path: Path,
) -> None:
    """Weights arrive under load, then the server is killed, then weights arrive again. Every token matches the
    oracle of the version that it carries."""
    work = jobs(broker.run_id)
    with replica.client() as client:
        initial = client.weights().version
        await Submission(broker).submit(work, fence=fence, limit=1000)
        first = await announce(broker, fence, tmp_path / "w1", folders["odd"])
        await until_serving(client, first.version)
        victim = server_processes(replica)[0]
        os.kill(victim.pid, signal.SIGKILL)
        await until_state(broker, ReplicaState.STARTING)
        assert client.weights().version == first.version
        with pytest.raises(UnavailableError, match="SIGKILL"):
            client.ready()
        await until_state(broker, ReplicaState.SERVING)
        assert client.ready().status == "ok"
        assert client.weights().version == first.version
        assert server_processes(replica)[0].pid != victim.pid
        second = await announce(broker, fence, tmp_path / "w2", folders["even"])
        groups = await collect(broker, fence, NUM_JOBS)
        await until_serving(client, second.version)
    weights = {initial: "even", first.version: "odd", second.version: "even"}
    assert sorted(groups) == sorted(job.job_id for job in work)
    seen = set()
    for job in work:
        for sample in groups[job.job_id].samples:
            for span in sample.versions:
                seen.add(span.version)
                checked = oracles[weights[span.version]].check(job, sample, span.start, span.end)
                assert checked >= 0.9 * (span.end - span.start) - 2
    assert first.version in seen
    assert not (await queue_health(broker)).dead


async def test_each_turn_of_a_session_has_the_log_probs_of_its_version(
    replica: ReplicaProcess, broker: Broker, fence: int, folders: dict[str, Path], tmp_path: Path
) -> None:
    await until_state(broker, ReplicaState.SERVING)
    await check_three_versions(replica, broker, fence, {name: folders[name] for name in ENDLESS}, tmp_path)


async def test_the_next_turn_of_a_session_reads_only_what_is_new(
    kind: str, replica: ReplicaProcess, broker: Broker
) -> None:
    await until_state(broker, ReplicaState.SERVING)
    await asyncio.to_thread(check_next_turn, replica, block=128 if kind == "vllm" else 1)


async def test_damaged_weights_are_refused_and_reported(
    replica: ReplicaProcess, broker: Broker, fence: int, folders: dict[str, Path], tmp_path: Path
) -> None:
    await until_state(broker, ReplicaState.SERVING)
    with replica.client() as client:
        before = client.weights().version
        damaged = await announce(broker, fence, tmp_path / "damaged", folders["odd"], break_it=True)

        async def reported() -> bool:
            return (await asyncio.to_thread(client.weights)).error is not None

        await until_async(reported)
        status = client.weights()
        assert status.version == before
        assert status.error is not None
        assert damaged.version in status.error
        assert "SHA-256 differs" in status.error
        response = client.rollout(prompt_ids=[5, 6], n=2, sampling={"max_tokens": 8})
        assert {span.version for sample in response.samples for span in sample.versions} == {before}


def test_nothing_of_the_server_listens_beyond_loopback_and_its_keys_are_hidden(replica: ReplicaProcess) -> None:
    listening = {
        connection.laddr.ip
        for process in server_processes(replica)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}
    assert not any("api-key" in part for process in server_processes(replica) for part in process.cmdline())


@pytest.mark.parametrize("kind", ["sglang"], indirect=True)
def test_the_server_lets_nobody_in_without_its_keys(replica: ReplicaProcess, tmp_path: Path) -> None:
    """Every route but OPEN is refused without a key and with a wrong one."""
    command = server_processes(replica)[0].cmdline()
    found = answers(f"http://127.0.0.1:{command[command.index('--port') + 1]}", tmp_path)
    assert sum(map(len, found.values())) > 100
    assert {call for both, calls in found.items() if both != ("401", "401") for call in calls} == OPEN
    rows = sorted((call, *both) for both, calls in found.items() for call in calls)
    check_table("sglang", ("Call", "no key", "wrong key"), rows, document="services/dvp_rl/http/SGLANG_CALLS.md")


def test_a_killed_replica_leaves_no_server(replica: ReplicaProcess) -> None:
    """The last test of this module, because it kills the replica."""
    everybody = server_processes(replica)
    replica.stop(signal.SIGKILL)
    assert not psutil.wait_procs(everybody, timeout=WITHIN_S)[1]
