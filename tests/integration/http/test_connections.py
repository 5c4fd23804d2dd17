"""Clients that send nothing, never finish a request, or never read the answer do not affect other clients."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import resource
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from fastapi import FastAPI, Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dvp_rl.http import connections, server
from dvp_rl.http.guard import Guard
from dvp_rl.http.server import bound, http_server
from dvp_rl.http.settings import MAX_REQUESTS
from tests.chaos.troubles import no_files
from tests.integration.http.served import serving
from tests.kit import web
from tests.kit.processes import PYTHON, process, run
from tests.kit.tokens import TOKEN
from tests.kit.wait import WITHIN_S, until, until_async

ANSWER_BYTES = 64 << 20
MEDIUM_BYTES = 8 << 20
"""More than the kernel takes if the other end has a small buffer."""
NUM_HALF_OPEN = 3_000
BURST = 1_000
QUEUED = Path("/proc/sys/net/core/somaxconn")
MAX_FILES = 2_048
BEGUN = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n"


def _app() -> FastAPI:
    app = FastAPI()

    @app.get("/healthz")
    def small() -> Response:
        return Response("here")

    @app.get("/large")
    def large() -> Response:
        return Response(bytes(ANSWER_BYTES))

    @app.get("/medium")
    def medium() -> Response:
        return Response(bytes(MEDIUM_BYTES))

    app.add_middleware(Guard, tokens=(), max_requests=MAX_REQUESTS)
    return app


@pytest.fixture
def patient() -> Iterator[str]:
    with serving(_app()) as url:
        yield url


@pytest.fixture
def url(patient: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A server with a short timeout for requests."""
    monkeypatch.setattr(connections, "REQUEST_TIMEOUT_S", 0.3)
    return patient


def _connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=WITHIN_S)


def _closed(client: socket.socket) -> bool:
    """Waits for the end of the connection, and discards what comes before it."""
    try:
        while client.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /hea",
        BEGUN,
        BEGUN + b"\r\n" + BEGUN,
        # The server answers without this body.
        BEGUN.replace(b"GET", b"POST") + b"Transfer-Encoding: chunked\r\n\r\n5\r\n12",
    ],
    ids=["nothing", "half a line", "half of the headers", "a second request by half", "half a body that nobody reads"],
)
def test_who_sends_no_whole_request_is_not_waited_for(url: str, sent: bytes) -> None:
    with _connect(url) as client:
        client.sendall(sent)
        assert _closed(client)


def test_who_sends_a_little_now_and_then_is_not_waited_for_either(url: str) -> None:
    with _connect(url) as client:
        client.sendall(BEGUN)

        def write() -> bool:
            try:
                client.sendall(b"a")
            except OSError:
                return True
            return False

        until(write, "the server closes the connection")


def test_headers_without_an_end_are_refused(patient: str) -> None:
    """The connection ends long before the 32 MiB that kernel and server would take without the limit."""
    with _connect(patient) as client:
        client.sendall(BEGUN)
        parts = (b"A: " + b"b" * (1 << 18) for _ in range(128))
        with pytest.raises(ConnectionError):
            all(client.sendall(part) is None for part in parts)


def test_who_does_not_read_is_not_waited_for(patient: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "READ_TIMEOUT_S", 0.3)
    with _connect(patient) as client:
        client.sendall(b"GET /large HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert client.recv(15) == b"HTTP/1.1 200 OK"
        until(lambda: _server_side(client) is None, "the server closes the connection")


def test_who_reads_slowly_gets_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test triggers the checks itself, so that timing does not matter."""
    looks: queue.Queue[Callable[[], object]] = queue.Queue()

    def watch(self: connections.Connection) -> None:
        unread = self.transport.get_write_buffer_size()
        self._idle.unread[self] = self.loop.call_later(WITHIN_S, self.end)
        looks.put(lambda: self.loop.call_soon_threadsafe(self._check_read, unread))

    monkeypatch.setattr(connections.Connection, "_watch", watch)
    with serving(_app()) as url, _connect(url) as client, client.makefile("rb") as answer:
        client.sendall(b"GET /large HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        for _ in range(2):
            look = looks.get(timeout=WITHIN_S)
            # More than the kernel buffers on both ends, so that the server has written some of it.
            assert len(answer.read(ANSWER_BYTES // 4)) == ANSWER_BYTES // 4
            look()
        look = looks.get(timeout=WITHIN_S)
        assert len(answer.read()) > ANSWER_BYTES // 2
        look()


def test_the_oldest_that_asks_nothing_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that are answered meanwhile stay open."""
    monkeypatch.setattr(connections, "REQUEST_TIMEOUT_S", WITHIN_S)
    with serving(_app(), max_requests=64) as url, ExitStack() as stack:
        clients = [stack.enter_context(_connect(url)) for _ in range(200)]
        assert all(_closed(client) for client in clients[:72])
        assert web.get(f"{url}/healthz").text == "here"
        assert _closed(clients[72])
        clients[-1].sendall(BEGUN + b"\r\n")
        assert clients[-1].recv(1 << 10).startswith(b"HTTP/1.1 200")


def test_thousands_that_say_nothing_stop_no_replica(small_model: Path, broker_url: str, tmp_path: Path) -> None:
    """There are more connections than files that the replica may open."""
    port_file, log = tmp_path / "port", tmp_path / "log"
    arguments = ["--model", str(small_model), "--engine", "fake", "--redis-url", broker_url, "--run-id", "half-open"]
    command = _limited(MAX_FILES, [*arguments, "--port", "0", "--port-file", str(port_file), "--token", TOKEN])
    with _many_files(), process(command, log) as replica, ExitStack() as stack:
        until(port_file.exists)
        url = f"http://127.0.0.1:{port_file.read_text().strip()}"
        until(lambda: web.get(f"{url}/readyz").status_code == 200)
        for _ in range(NUM_HALF_OPEN):
            stack.enter_context(_connect(url)).sendall(BEGUN)
            assert replica.poll() is None
        headers = {"Authorization": f"Bearer {TOKEN}"}
        assert web.get(f"{url}/healthz").status_code == 200
        job = {"prompt": "1", "job_id": "one"}
        assert web.post(f"{url}/v1/jobs", json=job, headers=headers).status_code == 202
        until(lambda: web.get(f"{url}/v1/jobs/one", headers=headers).json()["status"] == "done")
        assert psutil.Process(replica.pid).num_fds() < MAX_FILES
    assert "closed the one that sends no request for longest" in log.read_text()
    assert "Traceback" not in log.read_text()
    assert log.stat().st_size < 20_000


def test_too_few_files_are_refused_by_name(small_model: Path) -> None:
    answer = run(_limited(512, ["--model", str(small_model), "--engine", "fake", "--port", "0"]))
    assert answer.returncode == 2
    assert "may open 512 files, and needs 960: raise the limit (ulimit -n)" in answer.stderr


def test_a_low_soft_limit_is_raised() -> None:
    with _files(soft=256):
        http_server(_app(), 0, MAX_REQUESTS)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 1_920


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "allowed"),
    [
        (1_024, 4_096, 1_024, 1_024),
        (1_024, 1_024, 1_024, 128),
        (1_024, 1_024, 2, 2),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 50_000, 50_000),
        (256, resource.RLIM_INFINITY, 50_000, 50_000),
        (1_000_000, 1_000_000, 50_000, 50_000),
    ],
)
def test_as_many_connections_as_files_allow(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, wanted: int, allowed: int
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    assert server._connections(wanted) == allowed
    assert all(soft < raised[0] <= (hard if hard >= 0 else wanted + server.OTHER_FILES) for raised in asked)


def test_headers_that_are_complete_are_limited_too(patient: str) -> None:
    for size, status in ((60_000, 200), (70_000, 431)):
        assert web.get(f"{patient}/healthz", headers={"A": "b" * size}).status_code == status


def test_trailers_are_not_kept(patient: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn alone would keep them, although nobody reads that body any more."""
    kept: list[bytes] = []
    keep = HttpToolsProtocol.on_header

    def on_header(self: HttpToolsProtocol, name: bytes, value: bytes) -> None:
        kept.append(name)
        keep(self, name, value)

    monkeypatch.setattr(HttpToolsProtocol, "on_header", on_header)
    head = b"POST /large HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    with _connect(patient) as client, client.makefile("rb") as answer:
        client.sendall(head + b"5\r\n12345\r\n0\r\nTrailer: a\r\n\r\n" + BEGUN + b"\r\n")
        assert any(b"HTTP/1.1 200 OK" in line for line in iter(answer.readline, b""))
    assert kept == [b"Host", b"Transfer-Encoding", b"Host"]


def test_a_request_that_is_refused_early_is_answered_and_its_body_taken(patient: str) -> None:
    """The body is far larger than headers may be."""
    with _connect(patient) as client, client.makefile("rb") as answer:
        client.sendall(b"POST /large HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000\r\n\r\n")
        assert answer.readline() == b"HTTP/1.1 405 Method Not Allowed\r\n"
        client.sendall(bytes(1_000_000) + b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert any(b"HTTP/1.1 200 OK" in line for line in iter(answer.readline, b""))


def test_a_burst_is_kept_while_the_server_is_busy() -> None:
    """The kernel drops what it cannot queue, and may reset such a connection later, after the request was sent."""
    app, busy, may_go_on = _app(), threading.Event(), threading.Event()

    @app.get("/busy")
    async def wait() -> Response:
        busy.set()
        may_go_on.wait()
        return Response("done")

    if int(QUEUED.read_text()) < BURST:
        pytest.skip(f"this machine queues no more than {QUEUED.read_text().strip()} connections ({QUEUED})")
    with _many_files(), serving(app, max_requests=BURST) as url, ExitStack() as stack:
        stack.callback(may_go_on.set)
        stack.enter_context(_connect(url)).sendall(BEGUN.replace(b"healthz", b"busy") + b"\r\n")
        assert busy.wait(WITHIN_S)
        clients = [stack.enter_context(_connect(url)) for _ in range(BURST)]
        may_go_on.set()
        for client in clients:
            client.sendall(BEGUN + b"\r\n")
        assert all(client.recv(1 << 10).startswith(b"HTTP/1.1 200") for client in clients)


def test_who_reads_none_of_many_answers_makes_room() -> None:
    """Probes are answered even when there are as many such clients as connections allowed."""
    with serving(_app(), max_requests=64) as url, ExitStack() as stack:
        for _ in range(140):
            client = stack.enter_context(_connect(url))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            client.sendall(b"GET /medium HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert client.recv(15) == b"HTTP/1.1 200 OK"
            assert web.get(f"{url}/healthz").text == "here"


def test_the_end_of_an_answer_waits_for_its_reader(patient: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait is longer than for a request: a silent connection that was opened later is closed meanwhile."""
    with _connect(patient) as client, client.makefile("rb") as answer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client.sendall(BEGUN + b"\r\n")
        while answer.readline() != b"\r\n":
            pass
        assert answer.read(4) == b"here"
        monkeypatch.setattr(connections, "REQUEST_TIMEOUT_S", 0.1)
        client.sendall(b"GET /medium HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        assert answer.readline() == b"HTTP/1.1 200 OK\r\n"
        with _connect(patient) as later:
            assert _closed(later)
        assert len(answer.read()) > MEDIUM_BYTES


async def test_a_listener_that_could_not_accept_closes_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio alone would try to accept on the closed listener a second later."""
    retry_s = 0.05
    monkeypatch.setattr(asyncio.constants, "ACCEPT_RETRY_DELAY", retry_s)
    one = http_server(_app(), 0, MAX_REQUESTS)
    with bound("127.0.0.1", 0) as listener, socket.socket() as client:
        running = asyncio.create_task(one.serve([listener]))
        await until_async(lambda: one.started)
        with no_files(os.getpid()):
            client.connect(listener.getsockname())
            await until_async(lambda: "out of system resource" in caplog.text)
            one.should_exit = True
            await running
    await asyncio.sleep(2 * retry_s)  # timers that were set before this one have fired by then
    errors = {record.getMessage().splitlines()[0] for record in caplog.records if record.levelno >= logging.ERROR}
    assert errors == {"socket.accept() out of system resource"}


def _limited(max_files: int, arguments: Sequence[str]) -> list[str]:
    """The command of a replica that cannot raise its limit on open files."""
    return ["bash", "-c", f'ulimit -n {max_files}; exec "$@"', "bash", *PYTHON, "dvp_rl.rollout", *arguments]


@contextmanager
def _files(soft: int) -> Iterator[None]:
    """Sets this process's soft limit on open files, and restores it."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def _many_files() -> Iterator[None]:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < 2 * NUM_HALF_OPEN:
        pytest.skip(f"this process may open {hard} files only")
    with _files(soft=2 * NUM_HALF_OPEN):
        yield


def _server_side(client: socket.socket) -> psutil._common.pconn | None:
    """The server's end of the client's connection, which is in this process, too; None once it is closed."""
    here = client.getsockname()
    sides = psutil.Process().net_connections("tcp")
    return next((side for side in sides if side.raddr and tuple(side.raddr) == here), None)
