"""The gateway of the deployment: a real HAProxy with its configuration, in front of replicas on this machine."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.kit import web
from tests.kit.images import DOCKER
from tests.kit.ports import free_port
from tests.kit.processes import process
from tests.kit.wait import until

HAPROXY = shutil.which("haproxy")

needs_haproxy = pytest.mark.skipif(HAPROXY is None, reason="no HAProxy on this machine (apt-get install haproxy)")


@contextmanager
def gateway(folder: Path, *ports: int) -> Iterator[str]:
    """Runs the gateway, and yields its URL. `ports`: of the replicas."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with process(_command(folder, port, *ports), folder / "haproxy.log") as child:

        def listens() -> bool:
            assert child.poll() is None, (folder / "haproxy.log").read_text()
            try:
                web.get(f"{url}/gateway")
            except httpx.TransportError:
                return False
            return True

        until(listens, "the gateway listens")
        yield url


def main() -> None:
    """Becomes the gateway, with arguments FOLDER PORT REPLICA_PORT..., for tests.kit.forked."""
    folder, *ports = sys.argv[1:]
    command = _command(Path(folder), *map(int, ports))
    os.execv(command[0], command)


def _command(folder: Path, port: int, *ports: int) -> list[str]:
    """Writes its configuration, in which the replicas' ports take the place of those found by name."""
    servers = "\n    ".join(f"server replica{number} 127.0.0.1:{number}" for number in ports)
    config = (DOCKER / "haproxy.cfg").read_text()
    for deployed, here in (
        ("bind :8000", f"bind 127.0.0.1:{port}"),
        ("server-template replica 64 rollout:8000", servers),
        (" resolvers network init-addr none resolve-prefer ipv4", ""),
    ):
        assert config.count(deployed) == 1
        config = config.replace(deployed, here)
    (folder / "haproxy.cfg").write_text(config)
    assert HAPROXY is not None
    return [HAPROXY, "-db", "-f", str(folder / "haproxy.cfg")]
