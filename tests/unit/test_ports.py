from __future__ import annotations

import asyncio
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from dvp_rl.ports import HOST, ReservedPort

IP_LOCAL_PORT_RANGE = 51
"""Socket option of Linux 6.3 and later: range of ports from which the system chooses for this socket."""

kept = pytest.mark.skipif(sys.platform != "linux", reason="ports are kept on Linux only")


@pytest.fixture
def anybody() -> Iterator[socket.socket]:
    with socket.socket() as anybody:
        yield anybody


def choose_only(somebody: socket.socket, port: int) -> None:
    try:
        somebody.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", port << 16 | port))
    except OSError:
        pytest.skip("this kernel has no range of ports for one socket")


@kept
@pytest.mark.parametrize("reuse", [False, True])
def test_the_system_gives_it_to_nobody_who_wants_any_port(anybody: socket.socket, reuse: bool) -> None:
    reserved = ReservedPort()
    choose_only(anybody, reserved.number)
    anybody.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
    with pytest.raises(OSError, match="in use"):
        anybody.bind((HOST, 0))


@kept
def test_the_system_gives_it_to_no_client(anybody: socket.socket) -> None:
    reserved = ReservedPort()
    choose_only(anybody, reserved.number)
    with closing(socket.create_server((HOST, 0))) as server, pytest.raises(OSError, match="assign requested address"):
        anybody.connect(server.getsockname())


async def test_a_server_that_names_it_listens_there_and_again_after_it_died() -> None:
    reserved = ReservedPort()
    for _ in range(2):
        server = await asyncio.start_server(lambda _, writer: writer.close(), HOST, reserved.number)
        reader, writer = await asyncio.open_connection(HOST, reserved.number)
        assert await reader.read() == b""
        writer.close()
        server.close()
        await server.wait_closed()


def test_nobody_listens_there(anybody: socket.socket) -> None:
    reserved = ReservedPort()
    with pytest.raises(ConnectionRefusedError):
        anybody.connect((HOST, reserved.number))


def test_a_port_that_somebody_listens_on_is_refused() -> None:
    with closing(socket.create_server((HOST, 0))) as server, pytest.raises(OSError, match="in use"):
        ReservedPort(server.getsockname()[1])
