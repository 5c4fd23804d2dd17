"""Fail-over with real servers and Sentinels, and users with least privilege."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio.sentinel import Sentinel

from dvp_rl.contract.errors import ConfigError
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.connection import Outage, open_client
from dvp_rl.transport.lease import TrainerLease
from dvp_rl.transport.roles import Role
from dvp_rl.transport.submission import Submission, Submitted
from tests.integration.transport.rig import NO_LIMIT
from tests.kit.ports import free_port
from tests.kit.records import make_job
from tests.kit.sentinels import Sentinels
from tests.kit.wait import WITHIN_S


@pytest.fixture(scope="module")
def sentinels(tmp_path_factory: pytest.TempPathFactory, broker_binary: Path | None) -> Iterator[Sentinels]:
    with Sentinels(tmp_path_factory.mktemp("sentinels"), broker_binary) as started:
        yield started
        logs = [entry for server in started.servers for entry in server.ask("ACL LOG")]
        assert [entry for entry in logs if entry["reason"] != "auth"] == [], "somebody was refused what it needs"


@pytest.mark.parametrize("role", [role for role in Role if role is not Role.SCALER])
async def test_every_part_finds_the_master(sentinels: Sentinels, run_id: str, role: Role) -> None:
    async with await Broker.connect(sentinels.url_of(role), run_id, role=role, create=False) as broker:
        assert (await broker.redis.connection_pool.get_master_address())[1] == sentinels.master.port


async def test_sentinels_that_are_away_are_passed_over(sentinels: Sentinels, run_id: str) -> None:
    away = f"127.0.0.1:{free_port()},127.0.0.1:{free_port()},127.0.0.1:{sentinels.ports[0]}"
    async with await Broker.connect(sentinels.url_of().replace(f"127.0.0.1:{sentinels.ports[0]}", away), run_id):
        pass


@pytest.mark.usefixtures("impatient")
async def test_a_name_that_no_sentinel_knows(sentinels: Sentinels, run_id: str) -> None:
    with pytest.raises(
        ConfigError, match=r"typo \(Sentinels at .*\) does not answer: no Sentinel names a living master"
    ):
        await Broker.connect(sentinels.url_of(name="typo"), run_id)


async def test_passwords_that_are_wrong(sentinels: Sentinels, run_id: str) -> None:
    """Wrong passwords fail at once, even for patient callers."""
    with pytest.raises(ConfigError, match=r"refuses the user or password of a Sentinel \(sentinel_username") as refusal:
        await Broker.connect(sentinels.url_of(password="guessed"), run_id, patience_s=WITHIN_S)
    assert "guessed" not in str(refusal.value)
    wrong = sentinels.url_of().replace(sentinels.servers[0].password, "guessed")
    with pytest.raises(ConfigError, match="refuses the user or password of redis_url"):
        await Broker.connect(wrong, run_id, patience_s=WITHIN_S)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis+sentinel://:secret@a,b", "its path must be /NAME"),
        ("redis+sentinel://:secret@a,b/m/x", "its path must be /NAME"),
        ("redis+sentinel://:secret@a,b/m/1/2", "its path must be /NAME"),
        ("redis+sentinel://:secret@a,b/m?db=1", "its path must be /NAME"),
        ("redis+sentinel://:secret@a,/m", "one of the Sentinels has no host"),
        ("redis+sentinel://:secret/m", "one of the Sentinels has no host"),
        ("redis+sentinel://:12345/m", "one of the Sentinels has no host"),
        ("redis+sentinel://a:0/m?sentinel_password=secret", "one of the Sentinels has no host, or port 0"),
        ("redis+sentinel://a/m?sentinel_password=secret&sentinel_password=b", "sentinel_password is given twice"),
        ("redis+sentinel://a/m?sentinel_password=sec#ret", "cannot be read"),
        ("redis+sentinel://a/m?sentinel_password=secret&retry=5", "expected redis"),
        ("redis+sentinel://:secret@a:x,b/m", "cannot be read"),
        ("redis+sentinel://:sec/ret@a,b/m", "cannot be read"),
        ("redis+sentinel://:secret@a,b/m?ssl_ca_certs=x", "ssl_ca_certs"),
        ("rediss+sentinel://:secret@a,b/m?ssl_ca_certs=/no/such/file", "/no/such/file: no such file"),
        ("redis+sentinel://:secret@a,b/m?no_such_option=1", "no_such_option"),
    ],
)
async def test_a_bad_url(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"redis_url: .*{message}") as refusal:
        await Broker.connect(url, "run")
    assert not re.search("sec.?ret|12345", str(refusal.value))


async def test_a_plus_in_a_password_is_a_plus() -> None:
    client = open_client("redis+sentinel://a/m?sentinel_password=p+q%2B", Outage(0.0))
    (sentinel,) = client.connection_pool.sentinel_manager.sentinels
    assert sentinel.connection_pool.connection_kwargs["password"] == "p+q+"


async def test_a_connection_to_the_last_master_is_not_used_again(sentinels: Sentinels, run_id: str) -> None:
    async with await Broker.connect(sentinels.url_of(), run_id) as broker:
        before = await broker.redis.client_id()
        assert await broker.redis.client_id() == before
        broker.redis.connection_pool.master_address = ("127.0.0.1", free_port())  # another call found the next
        assert await broker.redis.client_id() != before


async def test_a_server_that_is_not_the_master_is_not_believed(
    sentinels: Sentinels, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Sentinel names a standby, which would answer reads; the client must reject it."""
    standby = next(server for server in sentinels.servers if server is not sentinels.master)
    named, know = [("127.0.0.1", standby.port)], Sentinel.discover_master

    async def named_first(self: Sentinel, name: str) -> Any:
        return named.pop() if named else await know(self, name)

    monkeypatch.setattr(Sentinel, "discover_master", named_first)
    async with await Broker.connect(sentinels.url_of(), run_id) as broker:
        assert not named
        assert (await broker.redis.info("replication"))["role"] == "master"


async def test_calls_go_on_with_the_next_master(sentinels: Sentinels, run_id: str) -> None:
    """The master is killed and a Sentinel hangs; then the next master hangs and comes back believing it is master."""
    url = sentinels.url_of(Role.TRAINER)
    async with await Broker.connect(url, run_id, role=Role.TRAINER, patience_s=WITHIN_S) as broker:
        submission = Submission(broker)
        fence = await TrainerLease(broker, "test").acquire()

        async def submit(position: int) -> Submitted:
            job = make_job(run_id, position)
            (outcome,) = await submission.submit([job], fence=fence, limit=NO_LIMIT)
            return outcome

        assert await submit(0) is Submitted.NEW
        killed = sentinels.master
        killed.kill()
        sentinels.processes[0].send_signal(signal.SIGSTOP)
        assert await submit(1) is Submitted.NEW
        killed.start()
        sentinels.processes[0].send_signal(signal.SIGCONT)
        await asyncio.to_thread(sentinels.await_copy, killed)
        assert await submit(0) is Submitted.QUEUED

        frozen = sentinels.master
        assert frozen is not killed
        frozen.signal(signal.SIGSTOP)
        assert await submit(2) is Submitted.NEW
        frozen.signal(signal.SIGCONT)
        await asyncio.to_thread(sentinels.await_copy, frozen)
        assert await submit(2) is Submitted.QUEUED
