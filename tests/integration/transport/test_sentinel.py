"""Fail-over by Sentinels: real servers, real Sentinels, users who may do what they do and no more."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.contract.errors import ConfigError
from services.transport.broker import Broker
from services.transport.lease import TrainerLease
from services.transport.roles import Role
from services.transport.submission import Submission, Submitted
from tests.integration.transport.rig import NO_LIMIT
from tests.kit.ports import free_port
from tests.kit.records import make_job
from tests.kit.sentinels import Sentinels
from tests.kit.wait import WITHIN_S


@pytest.fixture(scope="module")
def sentinels(tmp_path_factory: pytest.TempPathFactory, broker_binary: Path | None) -> Iterator[Sentinels]:
    with Sentinels(tmp_path_factory.mktemp("sentinels"), broker_binary) as started:
        yield started
        logs = [entry for server in started.servers for entry in server.ask("ACL", "LOG")]
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
    with pytest.raises(ConfigError, match=r"Redis at typo \(Sentinels at .*\) does not answer: No master found for"):
        await Broker.connect(sentinels.url_of(name="typo"), run_id)


async def test_passwords_that_are_wrong(sentinels: Sentinels, run_id: str) -> None:
    """Nobody waits for them, however patient."""
    with pytest.raises(ConfigError, match=r"refuses the user or password of a Sentinel \(sentinel_username") as refusal:
        await Broker.connect(sentinels.url_of(password="guessed"), run_id, patience_s=WITHIN_S)
    assert "guessed" not in str(refusal.value)
    wrong = sentinels.url_of().replace(sentinels.servers[0].password, "guessed")
    with pytest.raises(ConfigError, match="refuses the user or password of redis_url"):
        await Broker.connect(wrong, run_id, patience_s=WITHIN_S)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis+sentinel://:secret@a,b", "does not name the master"),
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
    assert "secret" not in str(refusal.value)


async def test_calls_go_on_with_the_next_master(sentinels: Sentinels, run_id: str) -> None:
    """First the master is killed, then it hangs and comes back, still thinking that it is the master."""
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
        assert await submit(1) is Submitted.NEW
        killed.start()
        await asyncio.to_thread(sentinels.await_copy, killed)
        assert await submit(0) is Submitted.QUEUED

        frozen = sentinels.master
        assert frozen is not killed
        frozen.signal(signal.SIGSTOP)
        assert await submit(2) is Submitted.NEW
        frozen.signal(signal.SIGCONT)
        await asyncio.to_thread(sentinels.await_copy, frozen)
        assert await submit(2) is Submitted.QUEUED
