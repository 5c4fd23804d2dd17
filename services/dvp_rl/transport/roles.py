"""Users of Redis that may do what their part of the system does, and no more.

`dvp-queue users` prints them; deploy/redis/users.conf is what it prints. `Broker.connect(..., role=...)` makes sure at
start that a user may do all of it: a script that was refused halfway would leave the books wrong.
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
"""Texts of the Lua scripts, by name. Read once: a process that can open no file more, or whose package is replaced
while it runs, goes on with those that it began with."""

_CONNECTION = "PING SELECT INFO TIME EVALSHA SCRIPT|LOAD"
_CLIENTS = "client_reserved client_held client_callers client_expiry client_deadlines"


class Role(StrEnum):
    """The name of the user, too."""

    ROLLOUT = "rollout"
    """A replica: takes jobs, gives back groups, admits jobs of clients. It cannot publish weights, send them to another
    replica, nor train."""
    TRAINER = "trainer"
    MONITOR = "monitor"
    """Sees everything, replays and drops dead letters."""
    OPERATOR = "operator"
    """All that dvp-queue does to a run, its removal included."""
    SCALER = "scaler"
    """Sees how many jobs there are (KEDA)."""


@dataclass(frozen=True)
class _Needs:
    scripts: str = ""
    commands: str = ""
    """Beside those of its scripts."""
    writes: str = ""
    """Names in Keys. What may be written may be read."""
    reads: str = ""
    puts: str = ""
    """May be written, and not read."""


_NEEDS = {
    Role.ROLLOUT: _Needs(
        scripts="create_groups start expire renew commit release fail abandon beat leave submit_client delete health",
        commands=f"{_CONNECTION} XREADGROUP XREAD STRLEN MULTI EXEC RPUSH BLPOP LREM",
        writes="jobs client_jobs groups evals dead in_flight counters replicas backlogs job result replica transfer "
        f"{_CLIENTS}",
        reads="versions closed lease uncheckpointed trainer",
        puts="transfers",  # who reads a request could answer it, with weights of its own
    ),
    Role.TRAINER: _Needs(
        scripts="create_groups lease_acquire lease_renew lease_release submit takeover bury_group settle acknowledge "
        "restore recount next_seq announce pin beat_trainer health pending sweep",
        commands=f"{_CONNECTION} XREADGROUP MGET SMEMBERS MULTI EXEC RPUSH BLPOP",
        writes="jobs client_jobs groups evals dead in_flight uncheckpointed counters versions seq pinned lease fence "
        f"replicas trainer job result replica transfers transfer {_CLIENTS}",
        reads="backlogs closed",
    ),
    Role.MONITOR: _Needs(
        scripts="health letters replay discard",
        commands=_CONNECTION,
        writes=f"jobs client_jobs groups evals dead in_flight counters job audit {_CLIENTS}",
        reads="versions closed fence uncheckpointed replicas replica trainer backlogs",
    ),
    Role.OPERATOR: _Needs(
        scripts="health pending letters replay discard delete close open purge",
        commands=f"{_CONNECTION} EXISTS SCAN HSCAN ZMSCORE",
        writes="everything",
    ),
    Role.SCALER: _Needs(commands="PING XLEN", reads="jobs client_jobs"),
}


def rules(role: Role, run_id: str = "*") -> str:
    """What ACL SETUSER takes, but for a password. With a run id, for that run alone."""
    allowed = [f"+{command.lower()}" for command in commands(role)]
    written, read, put = _patterns(role, run_id)
    keys = [*(f"%R~{key}" for key in read), *(f"%W~{key}" for key in put), *(f"~{key}" for key in written)]
    return " ".join(["on", "resetchannels", "-@all", *allowed, *keys])


def commands(role: Role) -> list[str]:
    needs = _NEEDS[role]
    return sorted({*needs.commands.split(), *(one for name in needs.scripts.split() for one in _commands_of(name))})


def trials(role: Role, run_id: str) -> list[str]:
    """Command lines, one for all that the role may do: each command, each key that it reads or writes."""
    written, read, put = _patterns(role, run_id)
    key = [*written, *read][0]
    odd = {"XREADGROUP": "XREADGROUP GROUP g c STREAMS {} >", "XREAD": "XREAD STREAMS {} 0"}
    # Where another command takes something else than a key, it may be called the same.
    tried = [odd.get(one, one.replace("|", " ") + " {0} {0} {0}").format(key) for one in commands(role)]
    if "HSET" in commands(role):
        tried += [f"HSET {one} f v" for one in [*written, *put]] + [f"HGET {one} f" for one in [*written, *read]]
    return tried


def _patterns(role: Role, run_id: str) -> list[list[str]]:
    """Keys, and for those with a prefix all that have it: written, read, put."""
    needs, keys = _NEEDS[role], Keys(run_id)

    def pattern(name: str) -> str:
        key = getattr(keys, name)
        return key if isinstance(key, str) else str(key("*"))

    return [[pattern(name) for name in names.split()] for names in (needs.writes, needs.reads, needs.puts)]


@cache
def _commands_of(script: str) -> frozenset[str]:
    """What a script calls, itself and in the functions of the prelude that it uses."""
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
