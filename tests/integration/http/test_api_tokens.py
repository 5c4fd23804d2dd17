"""Tokens that are added, changed and removed while a service runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dvp_rl.contract.errors import ConfigError
from dvp_rl.http import api_tokens as tokens_module
from dvp_rl.http.api_tokens import ApiTokens, Caller, Scope
from tests.integration.http.served import APPS, serving
from tests.kit import web
from tests.kit.tokens import TOKEN, write_token
from tests.kit.wait import until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tokens"


@pytest.fixture
def alice(folder: Path) -> str:
    """Alice's token, the only one in the folder."""
    return write_token(folder, Scope.ROLLOUT, "alice")


@pytest.fixture
def url(folder: Path, alice: str) -> Iterator[str]:
    with serving(APPS["dvp-rollout"](ApiTokens(folder=folder))) as url:
        assert status(url, alice) == 200
        yield url


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every call reread the folder."""
    monkeypatch.setattr(tokens_module, "FRESH_S", 0.0)


def status(url: str, token: str) -> int:
    return web.get(f"{url}/metrics", headers={"Authorization": f"Bearer {token}"}).status_code


def test_a_token_is_replaced_without_a_pause(url: str, folder: Path, alice: str) -> None:
    new = write_token(folder, Scope.ROLLOUT, "alice", "n" * 20, alice)
    until(lambda: status(url, new) == 200, "the new token is accepted")
    assert status(url, alice) == 200
    write_token(folder, Scope.ROLLOUT, "alice", new)
    until(lambda: status(url, alice) == 401, "the old token is refused")
    assert status(url, new) == 200


def test_callers_come_and_go(url: str, folder: Path, alice: str) -> None:
    bob = write_token(folder, Scope.READ, "bob")
    until(lambda: status(url, bob) == 200, "bob is let in")
    (folder / "rollout" / "alice").unlink()
    until(lambda: status(url, alice) == 401, "alice is not")
    assert status(url, bob) == 200
    (folder / "read" / "bob").rename(folder / "read" / "carol")
    assert status(url, bob) == 200


def test_a_caller_gets_another_scope(url: str, folder: Path, alice: str) -> None:
    def may_reload() -> bool:
        return web.post(f"{url}/v1/weights", headers={"Authorization": f"Bearer {alice}"}).status_code != 403

    assert not may_reload()
    (folder / "operate").mkdir()
    (folder / "rollout" / "alice").rename(folder / "operate" / "alice")
    until(may_reload, "alice operates")


@pytest.mark.usefixtures("fresh")
def test_an_emptied_folder_lets_nobody_in(url: str, folder: Path, alice: str) -> None:
    """A service that loses its last token does not become open to everybody."""
    (folder / "rollout" / "alice").unlink()
    for token in (alice, "wrong"):
        assert status(url, token) == 401
    folder.rename(folder.with_name("elsewhere"))
    for token in (alice, "wrong"):
        assert status(url, token) == 401
    folder.with_name("elsewhere").rename(folder)
    write_token(folder, Scope.ROLLOUT, "alice", alice)
    assert status(url, alice) == 200


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("rollout/alice", "short", "a token has 5 characters, at least 16 are needed"),
        ("rollout/alice", "", "holds no token"),
        ("rollout/alice", f"{TOKEN}\n\xe9{TOKEN}", "characters that no header can hold"),
        ("rollout/alice", f"{TOKEN} {TOKEN}", "characters that no header can hold"),
        ("rollout/alice", f"{TOKEN}\xa0{TOKEN}", "characters that no header can hold"),
        ("rollout/alice", TOKEN * 1000, "more than 4096 bytes"),
        ("rollout/alice~", TOKEN, "not a caller's name"),
        ("rollout/a\nERROR \x1b[31mlice", TOKEN, r"a\nERROR \x1b[31mlice': not a caller's name"),
        ("rollout/alice.bak", TOKEN, "not a caller's name"),
        ("operate/alice", "{bob}", "repeats a token of read/bob, and counts as it"),
        ("roll-out/alice", TOKEN, "roll-out': not a scope; expected read, rollout, harness, weights, operate"),
        ("alice", TOKEN, "alice': not a scope"),
    ],
)
@pytest.mark.usefixtures("fresh")
def test_what_is_no_token_is_named_and_refused(
    name: str, text: str, reason: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It keeps a service from starting; while one runs, the other callers are let in as before."""
    bob = write_token(folder, Scope.READ, "bob")
    running = ApiTokens(folder=folder)
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text.format(bob=bob), encoding="latin-1")
    with pytest.raises(ConfigError) as refused:
        ApiTokens(folder=folder)
    assert f"{folder / Path(name).parts[0]}" in str(refused.value)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
    with caplog.at_level(logging.ERROR, "dvp_rl.tokens"):
        for _ in range(3):
            assert running.find(bob.encode()) is not None
    assert reason in caplog.text
    assert caplog.text.count(str(file.parent)) == 1, "once, however many calls come"
    assert running.find(TOKEN.encode()) is None
    for said in (str(refused.value), caplog.text):
        assert TOKEN not in said
        assert bob not in said


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_what_is_no_file_is_not_waited_for(make: Callable[[Path], None], folder: Path, alice: str) -> None:
    make(folder / "rollout" / "bob")
    with pytest.raises(ConfigError, match=r"bob': (not a regular file|Is a directory)"):
        ApiTokens(folder=folder)


@pytest.mark.parametrize(
    ("damage", "said", "read"),
    [
        (lambda read: read.rename(read.with_name(".gone")), "", False),
        (lambda read: (read.rename(read.with_name(".gone")), read.write_text("x")), "read': Not a directory", False),
        (lambda read: (read.rename(read.with_name(".gone")), read.symlink_to("read")), "read': Too many levels", False),
        (lambda read: (read / "loop").symlink_to("loop"), "read/loop': Too many levels", True),
        (lambda read: (read / "link").symlink_to("nowhere"), "read/link': No such file", True),
    ],
    ids=["gone", "a file", "a loop", "a loop in it", "a link to nothing"],
)
@pytest.mark.usefixtures("fresh")
def test_what_is_wrong_with_one_scope_locks_nobody_of_another_out(
    damage: Callable[[Path], object],
    said: str,
    read: bool,
    folder: Path,
    alice: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader = write_token(folder, Scope.READ, "reader")
    tokens = ApiTokens(folder=folder)
    damage(folder / "read")
    assert tokens.find(alice.encode()) is not None
    assert (tokens.find(reader.encode()) is not None) is read
    problems = [line for line in caplog.messages if line.startswith("token_folder")]
    assert len(problems) == bool(said)
    assert said in "".join(problems)


@pytest.mark.usefixtures("fresh")
def test_a_change_of_scope_is_said(folder: Path, alice: str, caplog: pytest.LogCaptureFixture) -> None:
    tokens = ApiTokens(folder=folder)
    (folder / "operate").mkdir()
    (folder / "rollout" / "alice").rename(folder / "operate" / "alice")
    with caplog.at_level(logging.INFO, "dvp_rl.tokens"):
        found = tokens.find(alice.encode())
    assert found is not None
    assert found.scope is Scope.OPERATE
    assert caplog.messages == [
        "a token of rollout/alice is no longer accepted",
        "a token of operate/alice is accepted",
    ]


def test_only_operators_are_named_in_the_log(
    url: str, folder: Path, alice: str, caplog: pytest.LogCaptureFixture
) -> None:
    bob = write_token(folder, Scope.OPERATE, "bob")
    until(lambda: status(url, bob) == 200, "bob is let in")
    with caplog.at_level(logging.INFO, "dvp_rl.operators"):
        for path, token in (("/healthz", bob), ("/v1/weights", "x" * 16), ("/v1/weights", alice), ("/v1/weights", bob)):
            web.post(url + path, headers={"Authorization": f"Bearer {token}"})
    assert [record.getMessage() for record in caplog.records if record.name == "dvp_rl.operators"] == [
        "bob: POST /v1/weights"
    ]


def test_a_folder_without_tokens_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory"):
        ApiTokens(folder=folder)
    (folder / "read").mkdir(parents=True)
    for listed in ((), (TOKEN,)):
        with pytest.raises(ConfigError, match=r"holds no token; expected .*/SCOPE/NAME"):
            ApiTokens(listed, folder)


@pytest.mark.usefixtures("fresh")
def test_kubernetes_mounts_are_read(folder: Path) -> None:
    """Kubernetes mounts a secret's files as links through a hidden link, which it replaces when the secret changes."""
    for generation, token in (("..1", TOKEN), ("..2", TOKEN[::-1])):
        (folder / "rollout" / generation).mkdir(parents=True)
        (folder / "rollout" / generation / "alice").write_text(token)
    (folder / "rollout" / "..data").symlink_to("..1")
    (folder / "rollout" / "alice").symlink_to("..data/alice")
    tokens = ApiTokens(folder=folder)
    found = tokens.find(TOKEN.encode())
    assert found is not None
    assert (found.scope, found.name) == (Scope.ROLLOUT, "alice")
    (folder / "rollout" / ".next").symlink_to("..2")
    (folder / "rollout" / ".next").replace(folder / "rollout" / "..data")
    assert tokens.find(TOKEN[::-1].encode()) is not None
    assert tokens.find(TOKEN.encode()) is None


def test_nobody_needs_a_token_where_there_is_none() -> None:
    tokens = ApiTokens()
    assert not tokens
    assert tokens.find(b"") is None
    assert tokens.still_has(Caller("", Scope.OPERATE))


def test_callers_do_not_show_their_tokens() -> None:
    caller = ApiTokens([TOKEN]).find(TOKEN.encode())
    assert repr(caller) == "Caller(name='token', scope=<Scope.OPERATE: 'operate'>)"
