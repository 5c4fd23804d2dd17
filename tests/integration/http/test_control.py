"""Who is let in, by every route of every service and every command of dvp-queue: asked for, and written down.

services/http/README.md shows what is found here, see table.py.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator

import click
import httpx
import pytest
import typer
from fastapi import FastAPI

from services.monitor.cli import app as queue_app
from services.monitor.cli import main
from tests.integration.http.served import APPS, serving
from tests.integration.http.table import check_table
from tests.kit import web
from tests.kit.wait import WITHIN_S

TOKENS = ("first-token", "second-token")
LOOPBACK, FOREIGN = "localhost", "evil.example"
OPEN = {"/healthz", "/readyz"}
HEAD = ("Service", "Call", "no token set", "and a foreign Host", "token set, none sent", "wrong token", "right token")


def _calls(app: FastAPI) -> Iterator[tuple[str, str]]:
    """(method, path) of all routes, FastAPI's own included."""
    for route in _flat(app.routes):
        for method in sorted(getattr(route, "methods", None) or ()):
            if method != "HEAD":
                yield method, route.path


def _flat(routes: list) -> Iterator:
    for route in routes:
        inner = getattr(getattr(route, "original_router", None), "routes", None)
        if inner is not None:
            yield from _flat(inner)
        else:
            yield route


def _status(client: httpx.Client, url: str, method: str, path: str, host: str, authorization: str | None) -> int:
    headers = {"Host": host} | ({"Authorization": authorization} if authorization else {})
    body = {"json": {"entry_ids": ["1-1"]}} if "dead" in path and method == "POST" else {}
    with client.stream(method, url + re.sub(r"\{\w+\}", "x", path), headers=headers, **body) as response:
        return response.status_code


def _rows(name: str) -> list[tuple[str, ...]]:
    rows = []
    with (
        serving(APPS[name](())) as open_url,
        serving(APPS[name](TOKENS)) as closed_url,
        httpx.Client(timeout=WITHIN_S) as client,
    ):
        for method, path in _calls(APPS[name](())):
            statuses = [
                _status(client, open_url, method, path, LOOPBACK, None),
                _status(client, open_url, method, path, FOREIGN, None),
                _status(client, closed_url, method, path, FOREIGN, None),
                _status(client, closed_url, method, path, FOREIGN, f"Bearer {TOKENS[0]}x"),
                *{_shown(_status(client, closed_url, method, path, FOREIGN, f"Bearer {token}")) for token in TOKENS},
            ]
            rows.append((name, f"`{method} {path}`", *(_shown(status) for status in statuses)))
    return rows


def _shown(status: int | str) -> str:
    return "answered" if status not in (401, 403) else str(status)


@pytest.fixture(scope="module")
def rows() -> list[tuple[str, ...]]:
    return [row for name in APPS for row in _rows(name)]


def test_nobody_is_let_in_without_a_token_or_from_elsewhere(rows: list[tuple[str, ...]]) -> None:
    assert len(rows) > 25
    for row in rows:
        assert len(row) == len(HEAD), f"two tokens are not treated alike: {row}"
        call = row[1].strip("`").partition(" ")[2]
        # Without a token set, nobody can change anything through the monitor.
        reads = "answered" if "/v1/dead/" not in call else "403"
        closed = ("answered", "answered") if call in OPEN else ("401", "401")
        assert row[2:] == (reads, "403", *closed, "answered"), row


def test_the_table_is_current(rows: list[tuple[str, ...]]) -> None:
    check_table("calls", HEAD, rows)


@pytest.mark.parametrize("name", APPS)
def test_a_page_of_another_site_changes_nothing(name: str) -> None:
    """Its user's browser adds the password by itself."""
    password = base64.b64encode(f":{TOKENS[0]}".encode()).decode()
    calls = [(method, path) for method, path in _calls(APPS[name](())) if method != "GET"]
    with serving(APPS[name](TOKENS)) as url, httpx.Client(timeout=WITHIN_S) as client:

        def status(method: str, path: str, origin: str) -> int:
            authorization = {"Authorization": f"Basic {password}", "Host": "dvp.example:8080", "Origin": origin}
            return client.request(method, url + path, headers=authorization).status_code

        for method, path in calls:
            for foreign in ("http://evil.example", "https://dvp.example", "http://dvp.example:80801", "null"):
                assert status(method, path, foreign) == 403
            assert status(method, path, "http://dvp.example:8080") not in (401, 403)
        assert status("GET", "/metrics", "http://evil.example") == 200


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "Basic"])
@pytest.mark.parametrize("token", ["", "first-toke", "first-token,second-token", "é", "\xff" * 4])
def test_what_is_no_token(scheme: str, token: str) -> None:
    with serving(APPS["dvp-weights"](TOKENS)) as url:
        headers = {"Authorization": f"{scheme} {token}".strip().encode("latin-1")}
        response = web.get(f"{url}/v1/weights/a/b/c", headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"]


def _commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path
    for name, found in (inner or {}).items():
        yield from _commands(found, (*path, name))


ARGUMENTS = {
    ("dead", "show"): ("1-1",),
    ("dead", "replay"): ("1-1",),
    ("dead", "drop"): ("1-1",),
    ("results", "drop"): ("a",),
    ("purge",): ("--yes", "--force"),
}


def test_dvp_queue_needs_the_brokers_password(
    broker_url: str, run_id: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    address = broker_url.partition("@")[2]
    commands = list(_commands(typer.main.get_command(queue_app)))
    assert len(commands) >= 9
    table = []
    for command in commands:
        codes = []
        for url in (f"redis://{address}", f"redis://:wrong@{address}"):
            argv = ["--redis-url", url, "--run-id", run_id, *command, *ARGUMENTS.get(command, ())]
            code, words = _run_queue(argv, monkeypatch, capsys)
            assert "refuses the user or password" in words, words
            codes.append(f"refused, exit code {code}")
        table.append((f"`dvp-queue {' '.join(command)}`", *codes))
    assert {code for _, *codes in table for code in codes} == {"refused, exit code 2"}
    check_table("commands", ("Command", "no password", "wrong password"), table)


def _run_queue(argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    monkeypatch.setattr("sys.argv", ["dvp-queue", *argv])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().err
