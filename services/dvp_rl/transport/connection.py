"""Reaching the broker: its URL, how long an answer is waited for, what is tried again, and what is refused.

redis://[user:password@]host:port/0       one server; rediss:// over TLS; unix:///path
redis+sentinel://[user:password@]host:26379,host:26379/NAME        the master of that name, which Sentinels know
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import sys
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import parse_qs, urlencode, urlsplit

from pydantic import AfterValidator
from redis.asyncio import Redis
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    MasterNotFoundError,
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.backoff import AbstractBackoff, ExponentialWithJitterBackoff, NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ConnectionError,
    MasterDownError,
    NoPermissionError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

from dvp_rl.contract.errors import ConfigError

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
REPLY_TIMEOUT_S = 10.0
SENTINEL_TIMEOUT_S = 2.0
"""For each step of asking one Sentinel: one that is away must not keep the others from being asked."""
SENTINEL_PORT = 26379
NUM_RETRIES = 5
TELL_S = 60.0
"""How often a patient caller is told that the broker is still away."""

_SCHEMES = ("redis://", "rediss://", "unix://", "redis+sentinel://", "rediss+sentinel://")


def _check_scheme(url: str) -> str:
    if not url.startswith(_SCHEMES):
        raise ValueError(f"must start with {', '.join(_SCHEMES[:-1])} or {_SCHEMES[-1]}")
    return url


RedisUrl = Annotated[str, AfterValidator(_check_scheme)]


cancelled_before = ContextVar("cancelled before", default=sys.maxsize)
"""How often the task had been cancelled when its `Broker.call` began. Outside of a call, no number is above it."""


def num_cancelled() -> int:
    task = asyncio.current_task()
    return task.cancelling() if task else 0


def heed_cancellation() -> None:
    """Raises a cancellation or time-out that was lost. redis-py writes inside of asyncio.wait_for, and that of Python
    3.11 drops a cancellation that comes just as the write ends."""
    if num_cancelled() > cancelled_before.get():
        raise asyncio.CancelledError


class Outage:
    """Whether the broker is away now, for all calls of one Broker; it tells those who wait for it."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.where = ""
        self.reason = ""
        """What the last call that failed met."""
        self.answered = False
        """Some call has ended well."""
        self._since = self._told = 0.0

    def failed(self, error: Exception) -> None:
        now, self.reason = time.monotonic(), str(error)
        if not self.patience_s:
            return
        if not self._since:
            self._since = self._told = now
            logger.warning("Redis at %s does not answer: %s; waiting for it", self.where, error)
        elif now - self._told >= TELL_S:
            self._told = now
            passed_s = now - self._since
            logger.warning("Redis at %s has not answered for %.0f s (%s); waiting for it", self.where, passed_s, error)

    def end(self) -> None:
        self.answered = True
        if self._since:
            logger.warning("Redis at %s answers again, after %.1f s", self.where, time.monotonic() - self._since)
            self._since = 0.0


_NOT_MASTER = (ReadOnlyError, MasterDownError, TryAgainError)
"""It was demoted, or its master is away."""
_NO_STANDBY = "NOREPLICAS"
"""It has lost those that copy it (min-replicas-to-write): another one may be the master by now."""


class _Backoff(AbstractBackoff):
    """redis-py's, which cannot count beyond 1,023 failures."""

    _of_few = ExponentialWithJitterBackoff(base=0.1, cap=2.0)

    def compute(self, failures: int) -> float:
        return self._of_few.compute(min(failures, 16))


_TLS_ENDED = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
"""What a server that goes away leaves behind. Before the first answer, every other error of TLS is a mistake."""


class RefusedError(RedisError):
    """The user, the password or something about TLS is wrong."""


class _Retry(Retry):
    """All connections of a Broker tell of one outage."""

    def __init__(self, outage: Outage, backoff: AbstractBackoff, retries: int) -> None:
        super().__init__(backoff, retries)
        self._outage = outage

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def _refusal(self, error: Exception, whose: str) -> RefusedError | None:
        """What redis-py takes for an outage, though trying again helps nobody: a password, certificate or key."""
        cause = error.__cause__ or error.__context__
        if isinstance(error, (AuthenticationError, AuthorizationError, NoPermissionError)):
            return RefusedError(f"refuses the user or password of {whose}: {error}")
        if isinstance(cause, ssl.SSLCertVerificationError):
            remedy = "rediss://...?ssl_ca_certs=FILE names the authority to trust"
            return RefusedError(f"shows a certificate that cannot be trusted: {error}; {remedy}")
        if isinstance(cause, ssl.SSLError) and not isinstance(cause, _TLS_ENDED) and not self._outage.answered:
            return RefusedError(f"cannot be spoken to over TLS: {error}; see redis_url's options")
        return None


class _ServerRetry(_Retry):
    """A server: it is tried again, and its absence told."""

    def __init__(self, outage: Outage) -> None:
        super().__init__(outage, _Backoff(), sys.maxsize if outage.patience_s else NUM_RETRIES)

    async def call_with_retry(self, do: Callable[[], Awaitable[Any]], *args: Any, **options: Any) -> Any:
        async def once() -> Any:
            heed_cancellation()
            try:
                return await do()
            except ResponseError as error:
                if not isinstance(error, _NOT_MASTER) and not str(error).startswith(_NO_STANDBY):
                    raise
                # Whoever is the master now answers on another connection.
                self._outage.failed(error)
                raise ConnectionError(str(error)) from error
            except (ConnectionError, TimeoutError) as error:
                if refusal := self._refusal(error, "redis_url"):
                    raise refusal from None
                self._outage.failed(error)
                raise

        return await super().call_with_retry(once, *args, **options)


class _SentinelRetry(_Retry):
    """One Sentinel of several: it is asked once, then the next one is. _ServerRetry tries all of them again."""

    def __init__(self, outage: Outage) -> None:
        super().__init__(outage, NoBackoff(), 0)
        self.reasons: list[str] = []
        """Why the Sentinels failed that the newest `discover_master` has asked."""

    async def call_with_retry(self, do: Callable[[], Awaitable[Any]], *args: Any, **options: Any) -> Any:
        async def once() -> Any:
            heed_cancellation()
            try:
                return await do()
            except RedisError as error:  # also of what is no Sentinel
                self.reasons.append(str(error))
                refusal = self._refusal(error, "a Sentinel (sentinel_username and sentinel_password in redis_url)")
                if refusal and not self._outage.answered:
                    raise refusal from None
                raise ConnectionError(str(error)) from error

        return await super().call_with_retry(once, *args, **options)


class _Sentinels(Sentinel):
    def __init__(self, nodes: list[tuple[str, int]], retry: _SentinelRetry, options: dict[str, Any]) -> None:
        super().__init__(nodes, sentinel_kwargs={**options, "retry": retry})  # type: ignore[no-untyped-call]
        self._reasons = retry.reasons

    async def discover_master(self, service_name: str) -> Any:
        self._reasons.clear()
        try:
            return await super().discover_master(service_name)
        except MasterNotFoundError:
            text = "; ".join([f"no Sentinel names a living master {service_name!r}", *dict.fromkeys(self._reasons)])
            raise MasterNotFoundError(text) from None


class _MasterPool(SentinelConnectionPool):
    """redis-py keeps a connection that was in use while the master changed, and goes on reading from the old one."""

    async def ensure_connection(self, connection: Any) -> None:
        if connection.is_connected and (connection.host, connection.port) != self.master_address:
            await connection.disconnect()
        await super().ensure_connection(connection)


class _ToMaster(SentinelManagedConnection):
    """redis-py asks the Sentinels for a new connection only (its issue 3874): one that broke would be made again to the
    server that it had, however long that one is away."""

    async def connect_to(self, address: tuple[str, int]) -> None:
        """A Sentinel may name a server that is not the master yet, or any more, and that would answer whoever reads."""
        await super().connect_to(address)  # type: ignore[no-untyped-call]
        await self.send_command("INFO", "replication", check_health=False)
        if b"role:master" not in await self.read_response():
            await self.disconnect()
            raise ConnectionError(f"{self.host}:{self.port}, which a Sentinel names, is not the master")

    async def connect_check_health(self, check_health: bool = True, retry_socket_connect: bool = True) -> None:
        if retry_socket_connect:
            await self.connect()  # type: ignore[no-untyped-call]
        else:  # to the server that a Sentinel has just named
            await super().connect_check_health(check_health, retry_socket_connect)


class _ToMasterOverTLS(_ToMaster, SentinelManagedSSLConnection):
    pass


def open_client(url: str, outage: Outage) -> Redis:
    """Opens no connection yet. Raises ConfigError, without the password. `outage.where` is then the server's name."""
    try:
        beyond = "".join(re.split("[/?#]", url.partition("://")[2], maxsplit=1)[1:])
        if not url.startswith("unix:") and ("@" in beyond or "#" in url):
            raise ValueError("the password ends the authority")  # and its first digits would be the port
        options: dict[str, Any] = {
            "protocol": 2,
            "socket_connect_timeout": CONNECT_TIMEOUT_S,
            "socket_timeout": REPLY_TIMEOUT_S,
            "health_check_interval": 15,
            "driver_info": None,  # CLIENT SETINFO, which Redis 7.0 does not know and no user needs
            "retry": _ServerRetry(outage),
            "retry_on_error": [ConnectionError, TimeoutError],
        }
        if url.startswith(("redis+sentinel:", "rediss+sentinel:")):
            client = _master(url, outage, options)
        else:
            client = Redis.from_url(url, **options)
            given = client.connection_pool.connection_kwargs
            outage.where = str(given.get("path") or f"{given.get('host', 'localhost')}:{given.get('port', 6379)}")
        # Opens nothing, but knows which options there are.
        client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
    except (ValueError, TypeError, AttributeError, RedisError) as error:
        # A ValueError of urllib's quotes a part of the password that it takes for the port.
        reason = "cannot be read; in a password, / ? # and @ are written %2F %3F %23 and %40"
        raise ConfigError(
            f"redis_url: {reason if isinstance(error, ValueError) else error}; expected "
            "redis://[user:password@]host:port/0 or redis+sentinel://[user:password@]host:port,host:port/NAME; "
            "rediss for TLS, with ?ssl_ca_certs=FILE for an authority of your own"
        ) from None
    for option in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        file = client.connection_pool.connection_kwargs.get(option)
        if file is not None and not Path(file).is_file():
            raise ConfigError(f"redis_url: {option}={file}: no such file; expected PEM")
    return client


def _master(url: str, outage: Outage, options: dict[str, Any]) -> Redis:
    """A client of whoever is the master. redis-py has no such URL; this is the one that others have agreed on."""
    parts = urlsplit(url)
    credentials, at, hosts = parts.netloc.rpartition("@")
    path = re.fullmatch(r"/([^/]+)(?:/(\d+))?", parts.path)
    query = parse_qs(parts.query.replace("+", "%2B"))  # as in the rest of a URL, and in many a password
    nodes = [urlsplit(f"//{host}") for host in hosts.split(",")]
    if path is None or "db" in query:
        raise RedisError("its path must be /NAME, the master's as the Sentinels know it, or /NAME/DATABASE")
    if not all(node.hostname and node.port != 0 for node in nodes):
        raise RedisError("one of the Sentinels has no host, or port 0")
    if twice := [key for key, values in query.items() if len(values) > 1]:
        raise RedisError(f"{twice[0]} is there twice")
    own = {key: query.pop(f"sentinel_{key}")[0] for key in ("username", "password") if f"sentinel_{key}" in query}
    scheme, name, database = parts.scheme.removesuffix("+sentinel"), path[1], path[2] or 0
    # Everything else is read as in any other URL.
    options |= parse_url(f"{scheme}://{credentials}{at}localhost/{database}?{urlencode(query, doseq=True)}")
    del options["host"]
    tls = {key: value for key, value in options.items() if key.startswith("ssl_")}
    over_tls = options.get("connection_class") is SSLConnection
    options["connection_class"] = _ToMasterOverTLS if over_tls else _ToMaster
    sentinel = _Sentinels(
        [(str(node.hostname), node.port or SENTINEL_PORT) for node in nodes],
        _SentinelRetry(outage),
        {
            **own,
            **tls,
            "ssl": over_tls,
            "protocol": 2,
            "socket_connect_timeout": SENTINEL_TIMEOUT_S,
            "socket_timeout": SENTINEL_TIMEOUT_S,
            "driver_info": None,
        },
    )
    outage.where = f"{name} (Sentinels at {hosts})"
    client: Redis = sentinel.master_for(name, connection_pool_class=_MasterPool, **options)
    return client


async def close_client(redis: Redis) -> None:
    await redis.aclose()
    if isinstance(redis.connection_pool, SentinelConnectionPool):
        await redis.connection_pool.sentinel_manager.aclose()
