"""The gateway of the deployment: a real HAProxy with its configuration, in front of replicas on this machine."""

from __future__ import annotations

import shutil
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
    """Runs the gateway, and yields its URL. `ports` of the replicas, which take the place of those found by name."""
    port = free_port()
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
    url = f"http://127.0.0.1:{port}"
    with process([HAPROXY, "-db", "-f", folder / "haproxy.cfg"], folder / "haproxy.log") as child:

        def listens() -> bool:
            assert child.poll() is None, (folder / "haproxy.log").read_text()
            try:
                web.get(f"{url}/gateway")
            except httpx.TransportError:
                return False
            return True

        until(listens, "the gateway listens")
        yield url
