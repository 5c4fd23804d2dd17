"""Connecting to the broker, and the messages when that fails."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from dvp_rl.contract.errors import ConfigError, UnavailableError
from dvp_rl.contract.keys import REPLICAS
from dvp_rl.http.settings import MAX_REQUESTS
from dvp_rl.transport import broker as broker_module
from dvp_rl.transport import connection
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.health import queue_health
from dvp_rl.transport.roles import SCRIPTS
from tests.kit.ports import free_port
from tests.kit.wait import WITHIN_S, until_async

ADMISSION = {"submit", "submit_client", "replay", "session_open", "session_append", "episode_take"}
READING = {"health", "letters", "pending", "sessions", "refused"}


@pytest.mark.usefixtures("impatient")
async def test_nobody_listens() -> None:
    port = free_port()
    with pytest.raises(ConfigError) as refusal:
        await Broker.connect(f"redis://:secret@127.0.0.1:{port}/0", "run")
    assert f"127.0.0.1:{port}" in str(refusal.value)
    assert "redis_url" in str(refusal.value)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("password", ["", ":wrong@"])
async def test_a_wrong_password(broker_url: str, password: str) -> None:
    address = broker_url.partition("@")[2]
    with pytest.raises(ConfigError, match="refuses the user or password of redis_url") as refusal:
        await Broker.connect(f"redis://{password}{address}", "run")
    assert "wrong" not in str(refusal.value).replace("WRONGPASS", "")


@pytest.mark.parametrize("url", ["http://localhost", "localhost:6379", "redis://localhost:notaport"])
async def test_a_bad_url(url: str) -> None:
    with pytest.raises(ConfigError, match=r"redis_url: .*expected redis://"):
        await Broker.connect(url, "run")


@pytest.mark.parametrize("options", ["", "?max_connections=3"])
async def test_more_calls_than_connections_wait_for_their_turn(
    own_broker: EmbeddedBroker, run_id: str, options: str
) -> None:
    """The number of calls is the number of requests that a service answers at once."""
    async with await Broker.connect(f"{own_broker.url}{options}", run_id) as broker:
        await asyncio.gather(*(queue_health(broker) for _ in range(MAX_REQUESTS)))
        opened = len(await broker.redis.client_list())
    assert opened <= (3 if options else broker_module.MAX_CALLS)


async def test_one_connection_is_enough_to_set_up_a_wiped_broker_again(own_broker: EmbeddedBroker, run_id: str) -> None:
    async with await Broker.connect(f"{own_broker.url}?max_connections=1", run_id) as broker:
        await broker.redis.flushall()
        stream = broker.keys.jobs
        assert await broker.read_group(stream, REPLICAS, "test", 1, 1) == []
        assert [group["name"] for group in await broker.redis.xinfo_groups(stream)] == [REPLICAS.encode()]


async def test_a_script_that_the_broker_forgets_at_once_is_loaded_again(
    own_broker: EmbeddedBroker, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is what a broker does that is killed between SCRIPT LOAD and EVALSHA."""
    async with await Broker.connect(own_broker.url, run_id) as broker:
        load, loaded = broker.redis.script_load, []

        async def load_and_forget(script: str) -> object:
            sha = await load(script)
            loaded.append(sha)
            if len(loaded) < 3:
                await broker.redis.script_flush()
            return sha

        monkeypatch.setattr(broker.redis, "script_load", load_and_forget)
        await broker.redis.script_flush()
        await broker.ensure_groups()
    assert len(loaded) == 3


async def test_a_failover_is_waited_for(own_broker: EmbeddedBroker, run_id: str) -> None:
    """The server is demoted, and for a moment there is no other master."""
    async with await Broker.connect(own_broker.url, run_id, patience_s=WITHIN_S) as broker:
        async with await Broker.connect(own_broker.url, run_id) as operator:
            await operator.redis.replicaof("127.0.0.1", free_port())
            waiting = asyncio.create_task(broker.ensure_groups())
            await until_async(lambda: "read only replica" in broker._outage.reason)
            await operator.redis.replicaof("NO", "ONE")
        await waiting


@pytest.mark.parametrize("digits", ["12345", "hunter2"])
@pytest.mark.parametrize("rest", ["/s@localhost:6379/0", "#s@localhost", "?s@localhost", "s@[localhost"])
async def test_a_password_that_breaks_the_url_is_not_repeated(rest: str, digits: str) -> None:
    with pytest.raises(ConfigError, match=r"redis_url: cannot be read; in a password, / .* are written %2F") as refusal:
        await Broker.connect(f"redis://:{digits}{rest}", "run")
    assert digits not in str(refusal.value)


async def test_a_broker_that_evicts_is_refused(own_broker: EmbeddedBroker, run_id: str) -> None:
    async with await Broker.connect(own_broker.url, run_id) as broker:
        await broker.redis.config_set("maxmemory-policy", "volatile-lru")
    async with await Broker.connect(own_broker.url, run_id) as broker:  # without maxmemory it evicts nothing
        await broker.redis.config_set("maxmemory", 2**30)
    with pytest.raises(ConfigError, match=r"maxmemory-policy volatile-lru: .* set it to noeviction"):
        await Broker.connect(own_broker.url, run_id)
    async with await Broker.connect(own_broker.url, run_id, create=False):  # observing is allowed
        pass


async def test_a_node_of_a_cluster_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_id: str) -> None:
    config, own = EmbeddedBroker._config, f"cluster-enabled yes\ncluster-port {free_port()}\n"
    monkeypatch.setattr(EmbeddedBroker, "_config", lambda self: config(self) + own)
    with EmbeddedBroker(tmp_path) as node, pytest.raises(ConfigError, match="is a node of a cluster"):
        await Broker.connect(node.url, run_id)


@pytest.mark.parametrize("run_id", ["", "a b", "a{b}", "a:b", "x" * 65, "a\n"])
async def test_a_bad_run_id(broker_url: str, run_id: str) -> None:
    with pytest.raises(ConfigError, match="run_id"):
        await Broker.connect(broker_url, run_id)


@pytest.mark.usefixtures("impatient")
async def test_a_broker_that_dies_is_named(own_broker: EmbeddedBroker, run_id: str) -> None:
    async with await Broker.connect(own_broker.url, run_id) as broker:
        own_broker.kill()
        with pytest.raises(UnavailableError, match=rf"127\.0\.0\.1:{own_broker.port} does not answer"):
            await broker.ensure_groups()
        own_broker.start()
        await broker.ensure_groups()


@pytest.mark.usefixtures("impatient")
async def test_a_patient_caller_waits_for_a_broker(
    own_broker: EmbeddedBroker, run_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    own_broker.kill()
    connecting = asyncio.create_task(Broker.connect(own_broker.url, run_id, patience_s=WITHIN_S))
    await until_async(lambda: len(told(caplog)) == 1)
    own_broker.start()
    async with await connecting as broker:
        own_broker.kill()
        calls = [asyncio.create_task(call) for call in (broker.ping(), broker.ensure_groups())]
        await until_async(lambda: len(told(caplog)) == 3)
        own_broker.start()
        await asyncio.gather(*calls)
    words = [re.sub(r".*(does not answer|answers again).*", r"\1", line) for line in told(caplog)]
    assert words == ["does not answer", "answers again"] * 2  # once for both calls


@pytest.mark.usefixtures("impatient")
async def test_patience_has_an_end(own_broker: EmbeddedBroker, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "REPLY_TIMEOUT_S", 0.1)
    own_broker.kill()
    with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{own_broker.port} does not answer: Error 111.*Start one"):
        await Broker.connect(own_broker.url, run_id, patience_s=0.5)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == connection.__name__]


@pytest.mark.parametrize("failures", [1, 20, 10**4, 10**9])
def test_the_next_attempt_comes_soon_however_many_failed(failures: int) -> None:
    assert 0 < connection._Backoff().compute(failures) <= 2


async def test_two_runs_share_nothing(broker_url: str, run_id: str) -> None:
    async with await Broker.connect(broker_url, run_id), await Broker.connect(broker_url, f"{run_id}-b") as other:
        keys = [key.decode() async for key in other.redis.scan_iter(f"*{run_id}*")]
        assert {re.search(r"\{(.*)\}", key)[1] for key in keys} == {run_id, f"{run_id}-b"}  # type: ignore[index]


async def test_another_run_loads_no_script_again(own_broker: EmbeddedBroker) -> None:
    cached = []
    for run_id in ("one", "another"):
        async with await Broker.connect(own_broker.url, run_id) as broker:
            await queue_health(broker)
            cached.append((await broker.redis.info("memory"))["number_of_cached_scripts"])
    assert cached[1] == cached[0] > 0


@pytest.mark.parametrize("name", sorted(SCRIPTS.keys() - {"prelude"}))
def test_every_script_that_drains_runs_with_the_memory_full(name: str) -> None:
    shebang = SCRIPTS[name].partition("\n")[0]
    if name in READING:
        assert shebang == "#!lua flags=no-writes"
    else:
        assert shebang == ("#!lua" if name in ADMISSION else "#!lua flags=allow-oom")


async def write_twice(broker: Broker, written: asyncio.Future[None]) -> None:
    async with broker.call():
        await asyncio.wait_for(written, 30)  # as redis-py does around every write
        await broker.redis.set(f"{broker.keys.jobs}:second", 1)


async def test_a_cancellation_is_heeded_in_the_middle_of_a_call(broker: Broker) -> None:
    written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(write_twice(broker, written))
    await asyncio.sleep(0)
    written.set_result(None)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not await broker.redis.exists(f"{broker.keys.jobs}:second")


async def test_the_end_of_its_time_is_heeded_in_the_middle_of_a_call(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_module, "CALL_TIMEOUT_S", 0)
    loop = asyncio.get_running_loop()
    written: asyncio.Future[None] = loop.create_future()
    loop.call_soon(written.set_result, None)
    with pytest.raises(UnavailableError, match="does not answer"):
        await write_twice(broker, written)
    assert not await broker.redis.exists(f"{broker.keys.jobs}:second")


@pytest.mark.parametrize("turns", range(1, 5))
async def test_a_cancelled_close_leaves_no_connection(own_broker: EmbeddedBroker, run_id: str, turns: int) -> None:
    async with await Broker.connect(own_broker.url, run_id) as watching:

        async def alone() -> bool:
            return len(await watching.redis.client_list()) == 1

        broker = await Broker.connect(own_broker.url, run_id)
        await asyncio.gather(*(broker.ping() for _ in range(4)))
        assert not await alone()
        closing = asyncio.create_task(broker.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        await until_async(alone)
