"""Redis users: each part has the permissions it needs and no more."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import typer
from redis.asyncio import Redis

from dvp_rl.contract.errors import ConfigError, UnavailableError
from dvp_rl.contract.keys import Keys
from dvp_rl.monitor.cli import app as queue_app
from dvp_rl.ports import ReservedPort
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.embedded import EmbeddedBroker, valkey_binary
from dvp_rl.transport.health import take_snapshot
from dvp_rl.transport.replicas import ReplicaRegistry
from dvp_rl.transport.roles import SCRIPTS, Role, commands, rules
from tests.kit.table import REPOSITORY, check_table
from tests.kit.wait import WITHIN_S

START = REPOSITORY / "deploy" / "redis" / "start.sh"

KEYS = [name for name, value in vars(Keys).items() if isinstance(value, property) and name != "everything"]
PREFIXES = ["job", "result", "played", "session", "turns", "replica", "transfer"]
ADMINISTRATION = """
    ACL LIST, BGREWRITEAOF, CLIENT KILL ID 1, CLIENT LIST, CLUSTER RESET, CONFIG GET *, CONFIG SET dir /, DEBUG SLEEP 0,
    DUMP {k}, EVAL x 0, FLUSHALL, FLUSHDB, FUNCTION LOAD x, KEYS *, MIGRATE h 1 k 0 1, MODULE LIST, MONITOR, PSYNC ? -1,
    PUBLISH c m, RENAME {k} {k}, REPLICAOF h 1, RESTORE {k} 0 x, SAVE, SCRIPT FLUSH, SHUTDOWN, SLOWLOG GET, SUBSCRIBE c,
    SWAPDB 0 1, SYNC
"""


async def _may(admin: Redis, user: str, line: str) -> bool:
    """Whether the server permits the command line to the user."""
    return bool(await admin.execute_command("ACL", "DRYRUN", user, *line.split()) == b"OK")


@pytest.fixture
async def admin(shared_broker: EmbeddedBroker) -> AsyncIterator[Redis]:
    async with Redis.from_url(shared_broker.url) as connected:
        yield connected


async def test_what_each_part_may_read_and_write(admin: Redis, run_id: str) -> None:
    keys = Keys(run_id)
    table, found = [], dict[str, list[str]]()
    for name in [*KEYS, *PREFIXES]:
        key = getattr(keys, name) if name in KEYS else getattr(keys, name)("x")
        answers = []
        for role in Role:
            # A command that the role has; the key's type does not matter.
            reads = await _may(admin, role, f"XLEN {key}" if role is Role.SCALER else f"HGET {key} f")
            writes = await _may(admin, role, f"HSET {key} f v")
            answers.append(("write" if reads else "put") if writes else "read" if reads else "")
        found[name] = answers
        table.append((f"`{name}`" if name in KEYS else f"`{name}:ID`", *answers))
    head = ("Key", *(f"`{role}`" for role in Role))
    check_table("roles", head, table, document="services/dvp_rl/transport/README.md")
    writers = {
        name: {role for role, may in zip(Role, answers, strict=True) if may in ("write", "put")}
        for name, answers in found.items()
    }
    for name in ("versions", "seq", "pinned", "lease", "fence", "trainer", "uncheckpointed"):
        assert writers[name] == {Role.TRAINER, Role.OPERATOR}, name
    assert found["transfers"][list(Role).index(Role.ROLLOUT)] == "put"
    assert writers["audit"] == {Role.MONITOR, Role.OPERATOR}
    assert writers["closed"] == {Role.OPERATOR}
    assert not any(found[name][list(Role).index(Role.MONITOR)] for name in ("result", "lease"))


@pytest.mark.parametrize("role", Role)
async def test_nobody_may_administer_the_broker(role: Role, admin: Redis, run_id: str) -> None:
    for line in ADMINISTRATION.format(k=Keys(run_id).jobs).split(","):
        assert await _may(admin, "default", line), "no such command"
        assert not await _may(admin, role, line), line


@pytest.mark.parametrize("role", Role)
async def test_nobody_may_touch_what_is_not_a_runs(role: Role, admin: Redis, run_id: str) -> None:
    command = "XLEN {}" if role is Role.SCALER else "HGET {} f"
    assert await _may(admin, role, command.format(Keys(run_id).jobs))
    for key in ("jobs", "dvp:jobs", "other:{a}:jobs", f"x{Keys(run_id).jobs}", "dvp:{a}:unknown"):
        assert not await _may(admin, role, command.format(key)) or (role is Role.OPERATOR and "unknown" in key)


async def test_a_user_can_be_held_to_one_run(admin: Redis, run_id: str) -> None:
    await admin.execute_command("ACL", "SETUSER", run_id, *rules(Role.ROLLOUT, run_id).split())
    try:
        for role in (Role.ROLLOUT, run_id):
            assert await _may(admin, role, f"HSET {Keys(run_id).jobs} f v")
        assert await _may(admin, Role.ROLLOUT, f"HSET {Keys('another').jobs} f v")
        assert not await _may(admin, run_id, f"HSET {Keys('another').jobs} f v")
    finally:
        await admin.execute_command("ACL", "DELUSER", run_id)


def test_the_rules_of_the_deployment_are_those_that_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    typer.main.get_command(queue_app)(["users"], standalone_mode=False)
    printed = capsys.readouterr().out
    assert printed.count("\n") == len(Role)
    written = (START.parent / "users.conf").read_text()
    assert [line for line in written.splitlines() if not line.startswith("#")] == printed.splitlines()


PASSWORDS = {role: f"of{role}" for role in Role if role is not Role.SCALER}
GIVEN = {f"{role.upper()}_REDIS_PASSWORD": password for role, password in PASSWORDS.items()}
GIVEN |= {"REDIS_PASSWORD": "ofall", "REDIS_MAXMEMORY": "64mb", "REDIS_APPENDFSYNC": "always"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("REDIS_PASSWORD", None),
        *(("REDIS_PASSWORD", value) for value in ("", '""', "a b", "a\nb")),
        *(("TRAINER_REDIS_PASSWORD", value) for value in (" ", "se'cret", "secr et", "a\nuser x on nopass +@all ~*")),
    ],
)
def test_redis_is_not_started_with_a_password_that_would_be_another(
    name: str, value: str | None, tmp_path: Path
) -> None:
    (tmp_path / "redis-server").write_text("#!/bin/sh\necho started\n")
    (tmp_path / "redis-server").chmod(0o755)
    variables = GIVEN | {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | ({} if value is None else {name: value})
    if value is None:
        del variables[name]
    done = subprocess.run(["sh", START], env=variables, capture_output=True, text=True, timeout=WITHIN_S)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"start.sh: {name} must consist of letters, digits")
    assert not (value or "").strip() or str(value) not in done.stderr


@contextmanager
def deployed(folder: Path, broker_binary: Path | None) -> Iterator[str]:
    """The address of a server started by deploy/redis/start.sh, with its data in `folder`."""
    port, binary = ReservedPort(), folder / "bin" / "redis-server"
    real = broker_binary or valkey_binary()
    binary.parent.mkdir(parents=True, exist_ok=True)
    binary.write_text(f'#!/bin/sh\nexec {real} "$@" --bind 127.0.0.1 --port {port.number}\n')
    binary.chmod(0o755)
    variables = GIVEN | {"PATH": f"{binary.parent}:{os.environ['PATH']}"}
    with subprocess.Popen(["sh", START], cwd=folder, env=variables, stdout=subprocess.DEVNULL) as server:
        yield f"127.0.0.1:{port.number}"
        words = Path(f"/proc/{server.pid}/cmdline").read_text()
        server.kill()
    assert str(real) in words
    assert not [password for password in ("ofall", *PASSWORDS.values()) if password in words], "for everybody to read"


@asynccontextmanager
async def deployed_broker(folder: Path, binary: Path | None, run_id: str) -> AsyncIterator[Broker]:
    with deployed(folder, binary) as address:
        async with await Broker.connect(f"redis://:ofall@{address}", run_id, patience_s=WITHIN_S) as broker:
            yield broker


async def test_the_deployments_redis_has_these_users(tmp_path: Path, broker_binary: Path | None, run_id: str) -> None:
    """A part without a password has no user."""
    with deployed(tmp_path, broker_binary) as address:
        async with await Broker.connect(f"redis://:ofall@{address}", run_id, patience_s=WITHIN_S) as broker:
            assert {*await broker.redis.acl_users()} == {"default", *PASSWORDS}
            given = await broker.redis.config_get("max*", "append*")
        for role, password in PASSWORDS.items():
            async with await Broker.connect(f"redis://{role}:{password}@{address}", run_id, role=role, create=False):
                pass
    assert (given["maxmemory"], given["maxmemory-policy"]) == (str(64 << 20), "noeviction")
    assert (given["appendonly"], given["appendfsync"]) == ("yes", "always")


async def test_the_deployments_redis_starts_with_a_backup(
    tmp_path: Path, broker_binary: Path | None, run_id: str
) -> None:
    """The backup is loaded once: a restart keeps later writes."""
    before, after = tmp_path / "before", tmp_path / "after"
    async with deployed_broker(before, broker_binary, run_id) as broker:
        await broker.redis.set(broker.keys.closed, "saved")
        await broker.redis.save()
    after.mkdir()
    shutil.copy(before / "dump.rdb", after / "restore.rdb")
    async with deployed_broker(after, broker_binary, run_id) as broker:
        assert await broker.redis.getset(broker.keys.closed, "since then") == b"saved"
    async with deployed_broker(after, broker_binary, run_id) as broker:
        assert await broker.redis.get(broker.keys.closed) == b"since then"


def test_a_backup_never_takes_the_place_of_a_queue(tmp_path: Path) -> None:
    (tmp_path / "restore.rdb").touch()
    (tmp_path / "appendonlydir").mkdir()
    variables = GIVEN | {"PATH": os.environ["PATH"]}
    done = subprocess.run(["sh", START], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=WITHIN_S)
    assert (done.returncode, done.stdout) == (1, "")
    assert "holds both restore.rdb and a queue (appendonlydir): remove one of them" in done.stderr


async def test_a_restore_that_was_cut_short_is_finished(
    tmp_path: Path, broker_binary: Path | None, run_id: str
) -> None:
    async with deployed_broker(tmp_path / "before", broker_binary, run_id) as broker:
        await broker.redis.set(broker.keys.closed, "saved")
        await broker.redis.save()
    moved = tmp_path / "after" / "restoring" / "appendonly.aof.1.base.rdb"
    moved.parent.mkdir(parents=True)
    shutil.copy(tmp_path / "before" / "dump.rdb", moved)
    async with deployed_broker(tmp_path / "after", broker_binary, run_id) as broker:
        assert await broker.redis.get(broker.keys.closed) == b"saved"


@asynccontextmanager
async def _user(broker: EmbeddedBroker, name: str, *given: str) -> AsyncIterator[str]:
    """The URL of a temporary user with these rules."""
    async with Redis.from_url(broker.url) as admin:
        await admin.execute_command("ACL", "SETUSER", name, ">password", *given)
        try:
            yield f"redis://{name}:password@{broker.url.partition('@')[2]}"
        finally:
            await admin.execute_command("ACL", "DELUSER", name)


@pytest.mark.parametrize("role", [Role.ROLLOUT, Role.TRAINER, Role.MONITOR, Role.OPERATOR])
async def test_who_may_do_all_of_it_comes_in(role: Role, shared_broker: EmbeddedBroker, run_id: str) -> None:
    for url in (shared_broker.url, shared_broker.url_of(role)):
        async with await Broker.connect(url, run_id, role=role, create=role in (Role.ROLLOUT, Role.TRAINER)):
            pass


@pytest.mark.parametrize("role", [Role.ROLLOUT, Role.TRAINER, Role.MONITOR, Role.OPERATOR])
async def test_whoever_may_do_less_is_refused_by_name(role: Role, shared_broker: EmbeddedBroker, run_id: str) -> None:
    """Each missing command or key is found at start, so that no script stops halfway."""
    wanted = rules(role).split()
    needed = [rule for rule in wanted if rule[0] in "+~%" and rule not in ("+evalsha", "+script|load")]
    for rule in needed:
        async with _user(shared_broker, f"less-{run_id}", *(other for other in wanted if other != rule)) as url:
            with pytest.raises(
                ConfigError, match=rf"refuses user 'less-{run_id}' \d+ of the commands of role {role}"
            ) as refusal:
                await Broker.connect(url, run_id, role=role, create=False)
            name = (
                rule[1:].replace("|", " ").upper() if rule[0] == "+" else rule.partition("~")[2].replace("*", run_id, 1)
            )
            assert name in str(refusal.value), rule
            assert "dvp-queue users" in str(refusal.value)
            assert "password@" not in str(refusal.value)


async def test_one_who_may_run_no_script_is_told_so(shared_broker: EmbeddedBroker, run_id: str) -> None:
    async with _user(shared_broker, f"none-{run_id}", "on") as url:
        for role in (Role.ROLLOUT, None):
            with pytest.raises(ConfigError, match=rf"refuses user 'none-{run_id}': .*permissions.*; dvp-queue users"):
                await Broker.connect(url, run_id, role=role, create=False)


@pytest.mark.parametrize("command", ["evalsha", "xpending", "hgetall"])
async def test_rules_that_change_while_it_runs_are_named(
    command: str, shared_broker: EmbeddedBroker, run_id: str
) -> None:
    """The process continues, because the permission may be restored, and never returns a wrong answer."""
    name = f"changed-{run_id}"
    async with (
        _user(shared_broker, name, *rules(Role.MONITOR).split()) as url,
        await Broker.connect(url, run_id, role=Role.MONITOR, create=False) as broker,
        Redis.from_url(shared_broker.url) as admin,
    ):
        await admin.execute_command("ACL", "SETUSER", name, f"-{command}")
        with pytest.raises(UnavailableError, match=rf"refuses user '{name}': .*; dvp-queue users"):
            await take_snapshot(broker)
        await admin.execute_command("ACL", "SETUSER", name, f"+{command}")
        assert await ReplicaRegistry(broker).told() == {}


def test_scripts_call_what_can_be_read_from_their_text() -> None:
    """The rules are derived from the scripts' text."""
    for name, text in SCRIPTS.items():
        calls = re.findall(r"(?:redis\.p?call|if_there)\((?!\.\.\.\))(.)", text)
        odd = 1 if name == "letters" else 0
        assert len([first for first in calls if first != "'"]) == odd, name
    assert {"XRANGE", "XREVRANGE"} <= {*commands(Role.MONITOR)} & {*commands(Role.OPERATOR)}, (
        "what letters.lua is told to call"
    )
