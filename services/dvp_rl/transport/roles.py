"""Redis users with least privilege, one per part of the system.

`dvp-queue users` prints their rules; deploy/redis/users.conf is its output. `Broker.connect(..., role=...)` checks at
start that a user has all permissions of its role: a script that is refused halfway would leave inconsistent state.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files

from dvp_rl.contract.keys import Keys

SCRIPTS = {
    file.name.removesuffix(".lua"): file.read_text()
    for file in (files(__package__) / "lua").iterdir()
    if file.name.endswith(".lua")
}
"""Texts of the Lua scripts, by name. They are read once, so that a process keeps its scripts if it runs out of file
descriptors or its package is replaced while it runs."""

_CONNECTION = "PING SELECT INFO TIME EVALSHA SCRIPT|LOAD"
_CLIENTS = "client_reserved client_held client_callers client_expiry client_deadlines client_sessions"


class Role(StrEnum):
    """A part of the system; the value is also the name of its Redis user."""

    ROLLOUT = "rollout"
    """A replica: takes jobs, returns groups, admits clients' jobs. It can neither publish weights, nor send them to
    another replica, nor act as the trainer."""
    TRAINER = "trainer"
    MONITOR = "monitor"
    """Reads the queue's state; replays and drops dead letters."""
    OPERATOR = "operator"
    """Everything that dvp-queue does to a run, its removal included."""
    SCALER = "scaler"
    """Reads the number of jobs (KEDA)."""


@dataclass(frozen=True)
class _Needs:
    scripts: str = ""
    commands: str = ""
    """Commands besides those of its scripts."""
    writes: str = ""
    """Names in Keys that the role may read and write."""
    reads: str = ""
    puts: str = ""
    """Names in Keys that the role may write but not read."""


_NEEDS = {
    Role.ROLLOUT: _Needs(
        scripts="create_groups start expire renew commit release fail abandon beat leave submit_client delete health "
        "session_open session_append session_beat session_finish session_delete episode_take",
        commands=f"{_CONNECTION} XREADGROUP XREAD STRLEN LRANGE MULTI EXEC RPUSH BLPOP LREM",
        writes="jobs client_jobs groups evals dead in_flight counters replicas backlogs job result replica transfer "
        "episodes played session turns "
        f"{_CLIENTS}",
        reads="versions closed lease uncheckpointed trainer",
        puts="transfers",  # a role that reads requests could answer them with its own weights
    ),
    Role.TRAINER: _Needs(
        scripts="create_groups lease_acquire lease_renew lease_release submit takeover bury_group settle "
        "acknowledge restore recount next_seq announce pin beat_trainer health pending sweep",
        commands=f"{_CONNECTION} HMGET HGETALL PTTL XREADGROUP GET SMEMBERS MULTI EXEC RPUSH BLPOP",
        writes="jobs client_jobs groups evals episodes dead in_flight uncheckpointed counters versions seq pinned "
        f"lease fence replicas trainer job result played session turns replica transfers transfer {_CLIENTS}",
        reads="backlogs closed",
    ),
    Role.MONITOR: _Needs(
        scripts="health letters replay discard",
        commands=f"{_CONNECTION} EXISTS SCAN",
        writes=f"jobs client_jobs groups evals episodes dead in_flight counters job audit {_CLIENTS}",
        reads="versions closed fence uncheckpointed replicas replica trainer backlogs",
    ),
    Role.OPERATOR: _Needs(
        scripts="health pending letters replay discard delete close open purge sessions session_delete",
        commands=f"{_CONNECTION} EXISTS SCAN HSCAN ZMSCORE",
        writes="everything",
    ),
    Role.SCALER: _Needs(commands="PING XLEN", reads="jobs client_jobs"),
}


def rules(role: Role, run_id: str = "*") -> str:
    """Arguments of ACL SETUSER except the password; with a run id, limited to that run."""
    allowed = [f"+{command.lower()}" for command in commands(role)]
    written, read, put = _patterns(role, run_id)
    keys = [*(f"%R~{key}" for key in read), *(f"%W~{key}" for key in put), *(f"~{key}" for key in written)]
    return " ".join(["on", "resetchannels", "-@all", *allowed, *keys])


def commands(role: Role) -> list[str]:
    needs = _NEEDS[role]
    return sorted({*needs.commands.split(), *(one for name in needs.scripts.split() for one in _commands_of(name))})


def trials(role: Role, run_id: str) -> list[str]:
    """Command lines that together use every permission of the role: each command, each key it reads or writes."""
    written, read, put = _patterns(role, run_id)
    key = [*written, *read][0]
    odd = {"XREADGROUP": "XREADGROUP GROUP g c STREAMS {} >", "XREAD": "XREAD STREAMS {} 0"}
    # A key's name also serves as every other argument.
    tried = [odd.get(one, one.replace("|", " ") + " {0} {0} {0}").format(key) for one in commands(role)]
    if "HSET" in commands(role):
        tried += [f"HSET {one} f v" for one in [*written, *put]] + [f"HGET {one} f" for one in [*written, *read]]
    return tried


def _patterns(role: Role, run_id: str) -> list[list[str]]:
    """Key patterns of the role: written, read, put. A name that stands for a prefix matches all its keys."""
    needs, keys = _NEEDS[role], Keys(run_id)

    def pattern(name: str) -> str:
        key = getattr(keys, name)
        return key if isinstance(key, str) else str(key("*"))

    return [[pattern(name) for name in names.split()] for names in (needs.writes, needs.reads, needs.puts)]


@cache
def _commands_of(script: str) -> frozenset[str]:
    """Commands that a script calls, directly and through the functions of the prelude it uses."""
    functions = dict(re.findall(r"^local function (\w+)(.*?)^end$", SCRIPTS["prelude"], re.S | re.M))
    found, used, texts = set[str](), set[str](), [SCRIPTS[script]]
    while texts:
        text = texts.pop()
        for command, first in re.findall(r"(?:redis\.p?call|if_there)\('(\w+)'(?:, '(\w+)')?", text):
            found.add(f"{command}|{first}" if command in ("XGROUP", "XINFO") else command)
        new = {name for name in functions if re.search(rf"\b{name}\(", text)} - used
        used |= new
        texts += [functions[name] for name in new]
    return frozenset(found)
