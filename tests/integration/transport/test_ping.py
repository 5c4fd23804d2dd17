"""deploy/redis/ping.sh, the broker's health check in compose and Kubernetes: a busy broker is not killed."""

from __future__ import annotations

import contextlib
import os
import resource
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import redis

from dvp_rl.transport.embedded import valkey_binary
from tests.kit.ports import free_port
from tests.kit.wait import WITHIN_S, until

PING = Path(__file__).parents[3] / "deploy" / "redis" / "ping.sh"
VALUE = os.urandom(2000)
"""A value large enough, also compressed, for the server to answer requests between two of them while it loads."""

Ask = Callable[[str], bool]


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def ask(tmp_path: Path, port: int) -> Ask:
    client = shutil.which("redis-cli")
    if client is None:
        pytest.skip("NOT TESTED: no redis-cli here (Debian's redis-tools)")
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "redis-cli").write_text(f'#!/bin/sh\nexec {shlex.quote(client)} -p {port} "$@"\n')
    (folder / "redis-cli").chmod(0o755)
    variables = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}

    def asked(what: str) -> bool:
        return subprocess.run(["sh", PING, what], env=variables, timeout=WITHIN_S).returncode == 0

    return asked


@contextmanager
def serving(folder: Path, port: int, **settings: str | int) -> Iterator[subprocess.Popen[bytes]]:
    """A running server, yielded before it answers. It ignores SIGXFSZ, because a full disk does not send it."""
    folder.mkdir(exist_ok=True)
    settings = {"bind": "127.0.0.1", "port": port, "save": '""', **settings}
    lines = "".join(f"{name.replace('_', '-')} {value}\n" for name, value in settings.items())
    command = ["sh", "-c", 'trap "" XFSZ; exec "$0" -', valkey_binary()]
    with subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as server:
        assert server.stdin is not None
        with server.stdin as stdin:
            stdin.write(lines.encode())
        try:
            yield server
        finally:
            server.kill()


def refused(call: Callable[[], object], word: str) -> bool:
    try:
        call()
    except redis.RedisError as error:
        return word in str(error)
    return False


def test_a_broker_that_is_well_or_gone(tmp_path: Path, port: int, ask: Ask) -> None:
    with serving(tmp_path / "data", port):
        until(lambda: ask("alive"))
        assert ask("ready")
    assert not ask("alive")
    assert not ask("ready")


def test_a_full_disk_is_not_mended_by_a_restart_and_is_for_the_monitor_to_tell(
    tmp_path: Path, port: int, ask: Ask
) -> None:
    with serving(tmp_path / "data", port, appendonly="yes") as server, redis.Redis(port=port) as client:
        until(lambda: ask("ready"))
        psutil.Process(server.pid).rlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        until(lambda: refused(lambda: client.rpush("list", VALUE), "MISCONF"))
        assert refused(client.ping, "MISCONF")
        assert ask("alive")
        assert ask("ready")


def test_a_long_script_is_work(tmp_path: Path, port: int, ask: Ask) -> None:
    with serving(tmp_path / "data", port, busy_reply_threshold=1), redis.Redis(port=port) as client:
        until(lambda: ask("ready"))
        with redis.Redis(port=port, socket_timeout=0.2) as busy, contextlib.suppress(redis.RedisError):
            busy.eval("while true do end", 0)
        until(lambda: refused(client.ping, "BUSY"))
        assert ask("alive")
        assert ask("ready")


def test_one_that_loads_is_left_to_it_and_not_asked_yet(tmp_path: Path, port: int, ask: Ask) -> None:
    with serving(tmp_path / "data", port), redis.Redis(port=port) as client:
        until(lambda: ask("ready"))
        for number in range(3000):
            client.set(str(number), VALUE)
        client.save()
    slow = {"key_load_delay": 100_000, "loading_process_events_interval_bytes": 1024}
    with serving(tmp_path / "data", port, **slow):
        until(lambda: ask("alive"))
        assert not ask("ready")
