"""The embedded broker."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from redis.asyncio import Redis

from dvp_rl.contract.errors import ConfigError
from dvp_rl.transport.embedded import EmbeddedBroker


async def test_it_keeps_its_data_and_its_address(own_broker: EmbeddedBroker) -> None:
    url = own_broker.url
    async with Redis.from_url(url) as redis:
        await redis.set("key", "value")
    own_broker.stop()
    own_broker.stop()
    own_broker.start()
    assert own_broker.url == url
    async with Redis.from_url(url) as redis:
        assert await redis.get("key") == b"value"
        assert (await redis.config_get("maxmemory-policy"))["maxmemory-policy"] == "noeviction"


def test_it_listens_on_loopback_with_a_password(own_broker: EmbeddedBroker) -> None:
    with socket.create_connection(("127.0.0.1", own_broker.port), timeout=5) as peer:
        peer.sendall(b"PING\r\n")
        assert peer.recv(100).startswith(b"-NOAUTH")
    pid = own_broker.pid
    assert own_broker.password not in Path(f"/proc/{pid}/cmdline").read_text()


def test_leaving_the_block_ends_the_process(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path) as broker:
        pid = broker.pid
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_busy_port_is_named(own_broker: EmbeddedBroker, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"port {own_broker.port}"):
        EmbeddedBroker(tmp_path / "second", port=own_broker.port).start()


def test_a_folder_with_blanks_and_quotes(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path / 'my "odd" folder', aof=True) as broker:
        assert (broker.folder / "appendonlydir").is_dir()
