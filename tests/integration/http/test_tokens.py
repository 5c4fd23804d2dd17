"""Tokens that come and go while a service runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.contract.errors import ConfigError
from services.http.tokens import Caller, Scope, Tokens
from tests.integration.http.served import APPS, serving
from tests.kit import web
from tests.kit.tokens import TOKEN, write_token
from tests.kit.wait import until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tokens"


@pytest.fixture
def alice(folder: Path) -> str:
    """Her token, the only one."""
    return write_token(folder, Scope.ROLLOUT, "alice")


@pytest.fixture
def url(folder: Path, alice: str) -> Iterator[str]:
    with serving(APPS["dvp-rollout"](Tokens(folder=folder))) as url:
        assert status(url, alice) == 200
        yield url


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


def test_an_emptied_folder_lets_nobody_in(url: str, folder: Path, alice: str) -> None:
    """It is not as if there never were tokens."""
    (folder / "rollout" / "alice").unlink()
    until(lambda: status(url, alice) == 401, "alice is refused")
    assert web.get(f"{url}/metrics").status_code == 401
    folder.rename(folder.with_name("elsewhere"))
    assert web.get(f"{url}/metrics").status_code == 401
    folder.with_name("elsewhere").rename(folder)
    write_token(folder, Scope.ROLLOUT, "alice", alice)
    until(lambda: status(url, alice) == 200, "alice is let in again")


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("rollout/alice", "short", "a token has 5 characters, at least 16 are needed"),
        ("rollout/alice", "", "holds no token"),
        ("rollout/alice", f"{TOKEN} \xe9{TOKEN}", "characters that no header can hold"),
        ("rollout/alice", TOKEN * 1000, "more than 4096 bytes"),
        ("rollout/alice~", TOKEN, "no name of a caller"),
        ("rollout/alice.bak", TOKEN, "no name of a caller"),
        ("operate/alice", "{bob}", "holds a token that another caller has, too"),
        ("roll-out/alice", TOKEN, "roll-out: no scope; expected read, rollout, weights, operate"),
        ("alice", TOKEN, "alice: no scope"),
    ],
)
def test_what_is_no_token_is_named_and_refused(
    name: str, text: str, reason: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At start nothing begins; later the others are let in as before."""
    bob = write_token(folder, Scope.READ, "bob")
    running = Tokens(folder=folder)
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text.format(bob=bob), encoding="latin-1")
    with pytest.raises(ConfigError) as refused:
        Tokens(folder=folder)
    assert f"{folder / Path(name).parts[0]}" in str(refused.value)
    assert reason in str(refused.value)
    with caplog.at_level(logging.ERROR, "services.http.tokens"):
        until(lambda: running.find(bob.encode()) is not None and bool(caplog.messages), "it is said")
    assert reason in caplog.text
    assert caplog.text.count(str(file.parent)) == 1, "once, however many calls come"
    assert running.find(TOKEN.encode()) is None
    for said in (str(refused.value), caplog.text):
        assert TOKEN not in said
        assert bob not in said


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_what_is_no_file_is_not_waited_for(make: Callable[[Path], None], folder: Path, alice: str) -> None:
    make(folder / "rollout" / "bob")
    with pytest.raises(ConfigError, match="bob: no ordinary file"):
        Tokens(folder=folder)


def test_a_folder_without_tokens_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory"):
        Tokens(folder=folder)
    (folder / "read").mkdir(parents=True)
    for listed in ((), (TOKEN,)):
        with pytest.raises(ConfigError, match=r"holds no token; expected .*/SCOPE/NAME"):
            Tokens(listed, folder)


def test_kubernetes_mounts_are_read(folder: Path) -> None:
    """A secret's files are links through a hidden link, which is replaced when the secret changes."""
    for generation, token in (("..1", TOKEN), ("..2", TOKEN[::-1])):
        (folder / "rollout" / generation).mkdir(parents=True)
        (folder / "rollout" / generation / "alice").write_text(token)
    (folder / "rollout" / "..data").symlink_to("..1")
    (folder / "rollout" / "alice").symlink_to("..data/alice")
    tokens = Tokens(folder=folder)
    found = tokens.find(TOKEN.encode())
    assert found is not None
    assert (found.scope, found.name) == (Scope.ROLLOUT, "alice")
    (folder / "rollout" / ".next").symlink_to("..2")
    (folder / "rollout" / ".next").replace(folder / "rollout" / "..data")
    until(lambda: tokens.find(TOKEN[::-1].encode()) is not None, "the new token is accepted")
    assert tokens.find(TOKEN.encode()) is None


def test_nobody_needs_a_token_where_there_is_none() -> None:
    tokens = Tokens()
    assert not tokens
    assert tokens.find(b"") is None
    assert tokens.still_has(Caller("", Scope.OPERATE))


def test_callers_do_not_show_their_tokens() -> None:
    caller = Tokens([TOKEN]).find(TOKEN.encode())
    assert repr(caller) == "Caller(name='token', scope=<Scope.OPERATE: 'operate'>)"
