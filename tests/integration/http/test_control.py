"""Tests who is let in by every route of every service and by every command of dvp-queue.

The tables of services/dvp_rl/http/README.md show the results, see table.py.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path

import click
import httpx
import pytest
import typer
from fastapi import FastAPI

from dvp_rl.http.api_tokens import ApiTokens, Scope
from dvp_rl.monitor.cli import app as queue_app
from dvp_rl.monitor.cli import main
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.roles import Role
from tests.integration.http.served import APPS, serving
from tests.kit import web
from tests.kit.table import check_table
from tests.kit.tokens import TOKEN, write_token
from tests.kit.wait import WITHIN_S

LOOPBACK, FOREIGN = "localhost", "evil.example"
OPEN = {"/healthz", "/readyz"}
NAMES = ("no token set", "and a foreign Host", "tokens set, none sent", "wrong token", *Scope)
HEAD = ("Service", "Call", *NAMES)


def _calls(app: FastAPI) -> Iterator[tuple[str, str]]:
    """(method, path) of all routes, including FastAPI's own."""
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


def _rows(name: str, folder: Path) -> list[tuple[str, ...]]:
    tokens = [write_token(folder, scope, "caller") for scope in Scope]
    rows = []
    with (
        serving(APPS[name](ApiTokens())) as open_url,
        serving(APPS[name](ApiTokens([TOKEN], folder))) as closed_url,
        httpx.Client(timeout=WITHIN_S) as client,
    ):
        for method, path in _calls(APPS[name](ApiTokens())):

            def status(url: str, host: str, token: str | None = None) -> str:
                authorization = None if token is None else f"Bearer {token}"
                return _shown(_status(client, url, method, path, host, authorization))  # noqa: B023

            listed = status(closed_url, FOREIGN, TOKEN)
            statuses = [
                status(open_url, LOOPBACK),
                status(open_url, FOREIGN),
                status(closed_url, FOREIGN),
                status(closed_url, FOREIGN, f"{TOKEN}x"),
                *(status(closed_url, FOREIGN, token) for token in tokens),
            ]
            assert listed == statuses[-1], "a token of settings may do what an operator's may"
            rows.append((name, f"`{method} {path}`", *statuses))
    return rows


def _shown(status: int) -> str:
    return "answered" if status not in (401, 403) else str(status)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, ...]]:
    return [row for name in APPS for row in _rows(name, tmp_path_factory.mktemp("tokens"))]


def test_everybody_may_do_what_their_token_is_for(rows: list[tuple[str, ...]]) -> None:
    """Expectations come from what each route is about, not from the rule under test. The OpenAPI document says the
    same."""
    assert len(rows) > 25
    documents = {name: make(ApiTokens()).openapi()["paths"] for name, make in APPS.items()}
    for service, call, *statuses in rows:
        method, path = call.strip("`").split()
        scopes = set(Scope)
        if path not in OPEN:
            scopes = {Scope.OPERATE} | _others(service, method, path)
        found = dict(zip(NAMES, statuses, strict=True))
        # Without tokens, nobody can change anything through the monitor.
        assert found.pop("no token set") == ("403" if "/v1/dead/" in path else "answered"), call
        assert found.pop("and a foreign Host") == "403", call
        nobody = {found.pop("tokens set, none sent"), found.pop("wrong token")}
        assert nobody == ({"answered"} if path in OPEN else {"401"}), call
        assert found == {scope: "answered" if scope in scopes else "403" for scope in Scope}, call
        operation = documents[service].get(path, {}).get(method.lower())
        if operation is not None:
            needed = [Scope(scope) for item in operation["security"] for scope in item["token"]]
            assert scopes == {scope for scope in Scope if all(map(scope.includes, needed))}, call


def _others(service: str, method: str, path: str) -> set[Scope]:
    if service == "dvp-weights" and path.startswith("/v1/weights/"):
        return {Scope.WEIGHTS}
    if path == "/v1/rollouts" or path.startswith(("/v1/jobs", "/v1/sessions", "/inference/")):
        return {Scope.ROLLOUT, Scope.HARNESS}
    if path == "/v1/episodes":
        return {Scope.HARNESS}
    return {Scope.READ, Scope.ROLLOUT, Scope.HARNESS} if method == "GET" else set()


def test_the_table_is_current(rows: list[tuple[str, ...]]) -> None:
    check_table("calls", HEAD, rows)


@pytest.mark.parametrize("name", APPS)
def test_a_page_of_another_site_changes_nothing(name: str) -> None:
    """Its user's browser adds the password automatically."""
    password = base64.b64encode(f":{TOKEN}".encode()).decode()
    calls = [(method, path) for method, path in _calls(APPS[name](ApiTokens())) if method != "GET"]
    with serving(APPS[name](ApiTokens([TOKEN]))) as url, httpx.Client(timeout=WITHIN_S) as client:

        def status(method: str, path: str, origin: str) -> int:
            authorization = {"Authorization": f"Basic {password}", "Host": "dvp.example:8080", "Origin": origin}
            return client.request(method, url + path, headers=authorization).status_code

        for method, path in calls:
            for foreign in ("http://evil.example", "https://dvp.example", "http://dvp.example:80801", "null"):
                assert status(method, path, foreign) == 403
            assert status(method, path, "http://dvp.example:8080") not in (401, 403)
        assert status("GET", "/metrics", "http://evil.example") == 200


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "Basic"])
@pytest.mark.parametrize("token", ["", TOKEN[:-1], f"{TOKEN},{TOKEN[::-1]}", "é", "\xff" * 4])
def test_what_is_no_token(scheme: str, token: str) -> None:
    with serving(APPS["dvp-weights"](ApiTokens([TOKEN, TOKEN[::-1]]))) as url:
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
    ("sessions", "drop"): ("a",),
    ("results", "drop"): ("a",),
    ("purge",): ("--yes", "--force"),
}


def test_dvp_queue_needs_an_operators_password(
    shared_broker: EmbeddedBroker, run_id: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    address = shared_broker.url.partition("@")[2]
    callers = {"no password": f"redis://{address}", "wrong password": f"redis://operator:wrong@{address}"}
    callers |= {f"`{role}`": shared_broker.url_of(role) for role in Role}
    commands = [command for command in _commands(typer.main.get_command(queue_app)) if command != ("users",)]
    assert len(commands) >= 9
    table = []
    for caller, url in callers.items():
        argvs = [["--redis-url", url, "--run-id", run_id, *one, *ARGUMENTS.get(one, ())] for one in commands]
        (answer,) = {_answer(*_run_queue(argv, monkeypatch, capsys)) for argv in argvs}
        table.append((caller, answer))
    assert [caller for caller, answer in table if answer == "let in"] == ["`operator`"]
    check_table("commands", ("Who", "Every command but `users`"), table)


def _answer(code: int, words: str) -> str:
    refused = re.search("refuses (the user or password|user)", words)
    assert refused or code == 0 or "this broker knows no such run" in words, words
    return f"refused, exit code {code}" if refused else "let in"


def _run_queue(argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    monkeypatch.setattr("sys.argv", ["dvp-queue", *argv])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().err
