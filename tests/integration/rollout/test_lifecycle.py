"""Overload, disconnects, a broker that comes and goes, tokens and a graceful stop, over real sockets."""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
import threading
from pathlib import Path

import pytest

from dvp_rl.client import AsyncClient, Client, Retry
from dvp_rl.contract.errors import ConfigError, OverloadedError, UnavailableError, WeightError
from dvp_rl.contract.http import Problem
from dvp_rl.contract.weights import Announcement
from dvp_rl.http.api_tokens import Scope
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.lease import TrainerLease
from dvp_rl.transport.roles import Role
from dvp_rl.transport.submission import Submission
from tests.integration.rollout.publishing import announce
from tests.kit import web
from tests.kit.replicas import ReplicaProcess, ReplicaThread
from tests.kit.tokens import write_token
from tests.kit.wait import WITHIN_S, until


def test_a_client_that_goes_away_stops_its_samples(slow_replica: ReplicaThread) -> None:
    async def ask_and_leave() -> None:
        async with AsyncClient(slow_replica.url) as client:
            asking = asyncio.create_task(client.rollout(prompt="1", n=2))
            await asyncio.to_thread(until, lambda: slow_replica.in_flight() == 2)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(ask_and_leave())
    until(lambda: slow_replica.in_flight() == 0)
    assert 'route="/v1/rollouts",status="499"' in web.get(f"{slow_replica.url}/metrics").text


def test_a_full_replica_answers_429_with_a_reason(slow_replica: ReplicaThread) -> None:
    body = b'{"prompt": "1", "n": 2}'
    head = b"POST /v1/rollouts HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", slow_replica.port)) as occupant:
        occupant.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        until(lambda: slow_replica.in_flight() == 2)
        refused = web.post(f"{slow_replica.url}/v1/rollouts", json={"prompt": "1", "n": 2})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert "2 samples of requests are in flight" in Problem.model_validate_json(refused.content).detail
        with Client(slow_replica.url, retry=Retry(tries=1)) as client, pytest.raises(OverloadedError) as caught:
            client.rollout(prompt="1", n=2)
        assert caught.value.retry_after_s >= 1
    until(lambda: slow_replica.in_flight() == 0)


def test_without_a_broker_the_queue_routes_say_so(slow_replica: ReplicaThread) -> None:
    assert web.get(f"{slow_replica.url}/readyz").status_code == 200
    answers = [
        web.post(f"{slow_replica.url}/v1/jobs", json={"prompt": "1"}),
        web.get(f"{slow_replica.url}/v1/jobs/a"),
        web.get(f"{slow_replica.url}/v1/queue"),
        web.post(f"{slow_replica.url}/v1/weights"),
    ]
    for answer in answers:
        assert answer.status_code == 503
        assert "without a redis_url" in Problem.model_validate_json(answer.content).detail


def test_a_token_protects_everything_but_the_probes(model: Path, tmp_path: Path) -> None:
    first = write_token(tmp_path, Scope.OPERATE, "first")
    second = write_token(tmp_path, Scope.ROLLOUT, "second")
    args = ["--model", str(model), "--engine", "fake", "--token-folder", str(tmp_path), "--host", "0.0.0.0"]
    with ReplicaThread(tmp_path / ".replica", *args, token=second) as replica:
        for path in ("/healthz", "/readyz"):
            assert web.get(replica.url + path).status_code == 200
        for path in ("/v1/weights", "/metrics", "/openapi.json", "/v1/queue", "/nothing", "/healthz/", "//healthz"):
            refused = web.get(replica.url + path)
            assert refused.status_code == 401, path
            assert refused.headers["www-authenticate"] == 'Basic realm="dvp-rollout"'
            assert Problem.model_validate_json(refused.content).status == 401
        for header in ("Bearer", "Bearer wrong", f"Basic {second}", second, f"Bearer {first} {second}"):
            wrong = web.get(f"{replica.url}/v1/weights", headers={"Authorization": header})
            assert wrong.status_code == 401, header
        for token in (first, second):
            with Client(replica.url, token=token) as client:
                assert client.weights().error is None
        # With a token the Host header does not matter: the service is meant to be reached by name.
        named = {"Host": "replica.example", "Authorization": f"Bearer {first}"}
        assert web.get(f"{replica.url}/v1/weights", headers=named).status_code == 200
        with Client(replica.url, token="wrong") as client, pytest.raises(ConfigError, match="needs a token"):
            client.rollout(prompt="1")


@pytest.mark.usefixtures("impatient")
def test_http_goes_on_while_the_broker_is_away(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broker = EmbeddedBroker(tmp_path / "broker", aof=True)
    args = ["--model", str(model), "--engine", "fake", "--redis-url", broker.url, "--run-id", "outage"]
    with ReplicaThread(tmp_path / "replica", *args, wait_ready=False) as replica:
        with replica.client() as client:
            until(lambda: str(broker.port) in web.get(f"{replica.url}/readyz").json()["detail"])
            detail = web.get(f"{replica.url}/readyz").json()["detail"]
            assert broker.password not in detail
            assert len(client.rollout(prompt="1", n=2).samples) == 2
            with pytest.raises(UnavailableError, match="job queue cannot be used"):
                client.submit(prompt="1")

            with broker:
                until(lambda: web.get(f"{replica.url}/readyz").status_code == 200)
                assert client.wait(client.submit(prompt="1"), timeout=WITHIN_S)
                broker.kill()
                until(lambda: web.get(f"{replica.url}/readyz").status_code == 503)
                assert len(client.rollout(prompt="1").samples) == 1
                broker.start()
                until(lambda: web.get(f"{replica.url}/readyz").status_code == 200)
                assert client.wait(client.submit(prompt="1"), timeout=WITHIN_S)
        assert broker.password not in caplog.text


def test_a_user_who_may_not_do_what_a_replica_does_is_named(
    model: Path, shared_broker: EmbeddedBroker, tmp_path: Path
) -> None:
    args = ["--model", str(model), "--engine", "fake", "--redis-url", shared_broker.url_of(Role.MONITOR)]
    with ReplicaThread(tmp_path, *args, wait_ready=False) as replica:
        until(lambda: "of the commands of role rollout" in web.get(f"{replica.url}/readyz").json()["detail"])


def cut_off(replica: ReplicaProcess) -> None:
    """Asks for a rollout and expects the replica to stop before it is done."""
    with replica.client() as client, pytest.raises(UnavailableError, match="stopping"):
        client.rollout(prompt="1")


def test_a_graceful_stop_gives_unfinished_jobs_back(model: Path, broker_url: str, tmp_path: Path) -> None:
    run = f"stop-{secrets.token_hex(4)}"
    args = ["--model", str(model), "--engine", "fake", "--fake.service-time-s", "600", "--drain-s", "2"]
    args += ["--redis-url", broker_url, "--run-id", run]
    with ReplicaProcess(tmp_path / "slow", *args) as replica, replica.client() as client:
        jobs = [client.submit(prompt="1", sampling={"max_tokens": 3}) for _ in range(3)]
        until(lambda: all(client.job(job).status == "running" for job in jobs))
        waiting = threading.Thread(target=cut_off, args=(replica,))
        waiting.start()
        until(lambda: replica.in_flight() == 4)
        assert replica.stop(signal.SIGINT) == 0
        waiting.join()
        assert "Traceback" not in replica.log

    async def left_behind() -> tuple[list[str], int]:
        async with await Broker.connect(broker_url, run) as broker:
            states = [(await Submission(broker).status(job)).state.value for job in jobs]
            return states, await broker.redis.zcard(broker.keys.replicas)

    assert asyncio.run(left_behind()) == (["queued"] * 3, 0)

    args[args.index("600")] = "0.01"
    with ReplicaThread(tmp_path / "fast", *args) as replica, replica.client() as client:
        for job in jobs:
            assert len(client.wait(job, timeout=WITHIN_S).samples) == 1
        assert client.queue().jobs.redelivered == 0


def test_the_port_is_free_again_after_a_stop(model: Path, tmp_path: Path) -> None:
    with ReplicaThread(tmp_path, "--model", str(model), "--engine", "fake") as replica:
        replica.stop()
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", replica.port))
    assert not (tmp_path / "port").exists()


def test_weights_over_http(model: Path, broker_url: str, tmp_path: Path) -> None:
    run = f"weights-{secrets.token_hex(4)}"

    def publish(folder: Path, *, break_it: bool) -> Announcement:
        async def published() -> Announcement:
            async with await Broker.connect(broker_url, run) as broker, TrainerLease(broker, "test").held() as fence:
                return await announce(broker, fence, folder, model, break_it=break_it)

        return asyncio.run(published())

    args = ["--model", str(model), "--engine", "fake", "--redis-url", broker_url, "--run-id", run]
    with ReplicaThread(tmp_path / "replica", *args) as replica, replica.client() as client:
        first = client.weights().version
        assert first.startswith(f"{run}:0:")
        bad = publish(tmp_path / "bad", break_it=True)
        with pytest.raises(WeightError, match="SHA-256 differs"):
            client.reload_weights()
        until(lambda: bad.version in str(client.weights().error))
        assert client.weights().version == first
        good = publish(tmp_path / "good", break_it=False)
        until(lambda: client.reload_weights().version == good.version)
        assert client.weights().error is None
        assert client.rollout(prompt="1").samples[0].versions[0].version == good.version
        until(lambda: client.queue().replicas[0].version == good.version)
        assert f"dvp_rollout_version_seq {float(good.seq)}" in web.get(f"{replica.url}/metrics").text
