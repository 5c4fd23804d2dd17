"""Client of Redis or Valkey for one run: bounded waits, scripts, consumer groups.

Only the Redis 7.0 command subset is used, so that Redis 7 and 8 and Valkey 8 and 9 all serve.
"""

from __future__ import annotations

import asyncio
import builtins
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, Self

from redis.asyncio import Redis
from redis.commands.core import AsyncScript
from redis.exceptions import (
    ConnectionError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from dvp_rl.cancellation import finished
from dvp_rl.contract.errors import (
    ConfigError,
    LeaseLostError,
    NoBrokerError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from dvp_rl.contract.keys import REPLICAS, TRAINER, Keys
from dvp_rl.contract.record import SCHEMA_VERSION
from dvp_rl.contract.weights import RUN_ID

from . import connection
from .connection import (
    Outage,
    RefusedError,
    cancelled_before,
    close_client,
    heed_cancellation,
    num_cancelled,
    open_client,
)
from .failpoints import failpoint
from .roles import SCRIPTS, Role, trials

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 30.0
"""Longest time for one call, including all its retries, in seconds."""
MAX_BLOCK_MS = 5_000
"""Longest blocking read, in milliseconds; well below the reply timeout."""
RELOAD_S = 0.1
"""Pause before reloading a script that the broker forgot right after loading it, in seconds."""
RESULT_TTL_S = 3600
"""TTL of an ended job's state and of a client's result, in seconds."""
MEMORY_SHARE = 0.7
"""Share of the broker's maxmemory above which admission stops."""
RESULT_SHARE = 0.85
"""Share of maxmemory above which clients' results are not stored: their jobs become dead letters."""
CLIENT_SHARE = 0.25
"""Share of maxmemory available to the jobs of a run's clients: no job that could exceed it is admitted."""
CLIENT_MEMORY_SHARE = 0.5
"""Share of maxmemory beyond which no client's job may push the broker's memory: the rest is the trainer's."""
AUDIT_LENGTH = 1_000
AUDIT_BYTES = 1_000
AUDIT_TTL_S = 90 * 24 * 3600
"""Limits of the audit: changes by people, bytes of each text, and TTL after the last change in seconds."""
KEY_BYTES = 512
"""Memory that a key and its accounting rows take besides the value, in bytes."""
RETRY_AFTER_MEMORY_S = 5.0
MAX_CALLS = 64
"""Concurrent calls by one process, each on its own connection; further calls wait for their turn. A service answers
many more requests at once, and its own work must find a connection, too."""

_KEYS = (
    *("jobs", "client_jobs", "groups", "evals", "episodes", "dead", "versions"),
    *("seq", "pinned", "lease", "fence", "in_flight", "uncheckpointed", "counters", "replicas", "trainer", "closed"),
    *("backlogs", "client_reserved", "client_held", "client_callers", "client_expiry", "client_deadlines"),
    *("client_sessions", "audit"),
)
"""Keys that every script has as constants, by the same name in capitals, besides the prefixes JOB, RESULT, PLAYED,
REPLICA, SESSION and TURNS."""


class Broker:
    """`await Broker.connect(url, run_id)`, then `async with broker:` or `await broker.close()`."""

    def __init__(self, redis: Redis, keys: Keys, outage: Outage) -> None:
        self.redis = redis
        self.keys = keys
        self._outage = outage
        self._scripts: dict[str, AsyncScript] = {}
        self._turns = asyncio.Semaphore(min(MAX_CALLS, redis.connection_pool.max_connections))

    @property
    def run_id(self) -> str:
        return self.keys.run_id

    @property
    def _where(self) -> str:
        return self._outage.where

    @property
    def user(self) -> str:
        return self.redis.connection_pool.connection_kwargs.get("username") or "default"

    @classmethod
    async def connect(
        cls, url: str, run_id: str, *, role: Role | None = None, create: bool = True, patience_s: float = 0.0
    ) -> Self:
        """Connects to the broker. Raises ConfigError (bad URL or run id, wrong password, a user who lacks permissions
        that `role` needs) or NoBrokerError (no answer); the message names host and port, never the password.
        `create=False` creates nothing for a run that does not exist; use it to observe only.

        If the broker is unavailable, a call retries a few times within seconds. With `patience_s`, every call, this one
        included, waits that long for it (REPLY_TIMEOUT_S at least) and logs the outage; use it for processes that
        cannot work without the broker."""
        if not re.fullmatch(RUN_ID, run_id):
            raise ConfigError(f"run_id {run_id!r}: must match {RUN_ID}")
        outage = Outage(patience_s)
        broker = cls(open_client(url, outage), Keys(run_id), outage)
        try:
            await (broker.check_role(role) if role else broker.ping())
            if create:
                await broker.check_server()
                await broker.ensure_groups()
        except UnavailableError as error:
            await broker.close()
            raise NoBrokerError(
                f"{str(error).rstrip('.')}. Start one (redis-server, valkey-server or `make demo`'s own) or correct "
                "redis_url"
            ) from None
        except BaseException:  # a cancellation, too, must not leave a connection behind
            await broker.close()
            raise
        return broker

    def beside(self, run_id: str) -> Broker:
        """The broker for another run, over the same connections. Close only the first."""
        broker = Broker(self.redis, Keys(run_id), self._outage)
        broker._turns, broker._scripts = self._turns, self._scripts
        return broker

    async def script(self, name: str, *args: str | bytes | int | float) -> Any:
        """Runs lua/<name>.lua. Raises LeaseLostError (not the owner, or fenced off), OverloadedError (the broker's
        memory is full and the script does not drain), UnavailableError (broker gone or too slow)."""
        script = self._scripts.get(name)
        if script is None:
            script = self._scripts[name] = self.redis.register_script(_source(name))
        failpoint(f"{name}.before")
        async with self.call():
            reply = await _run(script, (*args, self.run_id))
        failpoint(f"{name}.after")
        return reply

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Context of one use of `redis`: bounds its time, retries included, and turns redis-py's exceptions into this
        project's errors. No cancellation is lost (heed_cancellation)."""
        before = cancelled_before.get()
        cancelled_before.set(num_cancelled())
        patience_s = self._outage.patience_s
        limit_s = max(connection.REPLY_TIMEOUT_S, patience_s) if patience_s else CALL_TIMEOUT_S
        try:
            async with asyncio.timeout(limit_s), self._turns:
                yield
            heed_cancellation()
            self._outage.end()
        except RefusedError as error:
            raise ConfigError(f"Redis at {self._where} {error}") from None
        except (ConnectionError, TimeoutError, builtins.TimeoutError) as error:
            reason = str(error) or self._outage.reason or f"no reply within {limit_s:g} s"
            raise UnavailableError(f"Redis at {self._where} does not answer: {reason}") from None
        except OutOfMemoryError:
            raise OverloadedError("the broker's memory is full (its maxmemory)", RETRY_AFTER_MEMORY_S) from None
        except ResponseError as error:
            if isinstance(error, NoPermissionError) or str(error).startswith(_REFUSED_IN_A_SCRIPT):
                kind = UnavailableError if self._outage.answered else ConfigError
                raise kind(f"Redis at {self._where} refuses user {self.user!r}: {error}; {_REMEDY}") from None
            code, _, detail = str(error).partition(" ")
            if code == "LEASELOST":
                raise LeaseLostError(detail) from None
            if code == "CONFLICT":
                raise RequestError(detail) from None
            raise UnavailableError(f"Redis at {self._where} refuses: {error}") from None
        except RedisError as error:
            raise UnavailableError(f"Redis at {self._where}: {error}") from None
        finally:
            cancelled_before.set(before)

    async def ping(self) -> None:
        """Raises UnavailableError, or ConfigError if the password is wrong."""
        async with self.call():
            await self.redis.time()  # not PING: a broker with a full disk refuses it like a write

    async def check_role(self, role: Role) -> None:
        """Raises ConfigError if the user lacks a permission that `role` needs."""
        refused = await self.script("refused", *trials(role, self.run_id))
        if refused:
            lines = [" ".join(dict.fromkeys(line.decode().split())) for line in refused[:3]]
            named = ", ".join(lines + ["..."] * (len(refused) > 3))
            raise ConfigError(
                f"Redis at {self._where} refuses user {self.user!r} {len(refused)} of the commands of role {role}: "
                f"{named}; {_REMEDY}"
            )

    async def check_server(self) -> None:
        """Raises ConfigError if the server cannot be trusted to keep a run."""
        async with self.call():
            info: Any = await self.redis.info()
        if info.get("cluster_enabled"):
            raise ConfigError(
                f"Redis at {self._where} is a node of a cluster, which is not supported: use a standalone server"
            )
        if info.get("maxmemory") and (policy := info["maxmemory_policy"]) != "noeviction":
            raise ConfigError(
                f"Redis at {self._where} has maxmemory-policy {policy}: once its memory is full it would evict jobs, "
                "groups and leases; set it to noeviction"
            )

    async def ensure_groups(self) -> None:
        """Creates missing consumer groups: at connect, and again after the broker was wiped."""
        await self.script("create_groups")

    async def read_group(
        self, stream: str, group: str, consumer: str, count: int, block_ms: int
    ) -> list[tuple[str, dict[bytes, bytes]]]:
        """New entries as (entry id, fields); [] after `block_ms`, or if the broker was wiped meanwhile."""
        block = max(1, min(block_ms, MAX_BLOCK_MS))
        reply: Any = None
        wiped = False
        async with self.call():
            try:
                reply = await self.redis.xreadgroup(group, consumer, {stream: ">"}, count=count, block=block)
            except ResponseError as error:
                # A wiped broker has no group; one that is wiped during the wait answers UNBLOCKED.
                wiped = str(error).startswith(("NOGROUP", "UNBLOCKED"))
                if not wiped:
                    raise
        if wiped:  # outside `call`: a caller that waits for another turn must not hold one
            logger.warning("the broker lost its streams; creating them again")
            await self.ensure_groups()
        failpoint(f"read.{group}.after")
        return [(entry_id.decode(), fields) for _, entries in reply or () for entry_id, fields in entries]

    async def close(self) -> None:
        await finished(close_client(self.redis))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


_REMEDY = "dvp-queue users prints the rules of each part's user"

_REFUSED_IN_A_SCRIPT = ("ACL failure in script", "The user executing the script can't")
"""Wording of Valkey, then of Redis."""


async def _run(script: AsyncScript, args: tuple[str | bytes | int | float, ...]) -> Any:
    """Runs a script until the broker has it. redis-py loads an unknown script and retries once; a broker that is killed
    or fails over between the two has lost it again."""
    while True:
        try:
            return await script(args=args)
        except NoScriptError:
            await asyncio.sleep(RELOAD_S)


@cache
def _source(name: str) -> str:
    """A script's text: shebang line, key names and constants, prelude, body. The keys are not declared in EVALSHA,
    because the caller would then need write permission for all of them. The run is the last argument, so that all runs
    share a text: the broker keeps each until it restarts."""
    shebang, _, body = SCRIPTS[name].partition("\n")
    keys = Keys("' .. RUN_ID .. '")
    constants = {
        "RUN_ID": "table.remove(ARGV)",
        **{key.upper(): f"'{getattr(keys, key)}'" for key in _KEYS},
        "JOB": f"'{keys.job('')}'",
        "RESULT": f"'{keys.result('')}'",
        "PLAYED": f"'{keys.played('')}'",
        "REPLICA": f"'{keys.replica('')}'",
        "SESSION": f"'{keys.session('')}'",
        "TURNS": f"'{keys.turns('')}'",
        "BOOKS": f"{{{', '.join(key.upper() for key in _KEYS)}}}",
        "REPLICA_GROUP": f"'{REPLICAS}'",
        "TRAINER_GROUP": f"'{TRAINER}'",
        "SCHEMA_VERSION": SCHEMA_VERSION,
        "RESULT_TTL_S": RESULT_TTL_S,
        "MEMORY_SHARE": MEMORY_SHARE,
        "RESULT_SHARE": RESULT_SHARE,
        "CLIENT_SHARE": CLIENT_SHARE,
        "CLIENT_MEMORY_SHARE": CLIENT_MEMORY_SHARE,
        "KEY_BYTES": KEY_BYTES,
        "AUDIT_LENGTH": AUDIT_LENGTH,
        "AUDIT_BYTES": AUDIT_BYTES,
        "AUDIT_TTL_S": AUDIT_TTL_S,
    }
    header = [f"local {key} = {value}" for key, value in constants.items()]
    return "\n".join([shebang, *header, SCRIPTS["prelude"], body])
