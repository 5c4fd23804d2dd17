"""Connection to the broker: URL, timeouts, retries, and errors that are not retried.

redis://[user:password@]host:port/0       one server; rediss:// over TLS; unix:///path
redis+sentinel://[user:password@]host:26379,host:26379/NAME        the master that the Sentinels know by that name
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
from typing import Any, Self
from urllib.parse import parse_qs, urlencode, urlsplit

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
"""Timeout of each step of asking one Sentinel, in seconds: one that is away must not delay asking the others."""
SENTINEL_PORT = 26379
NUM_RETRIES = 5
TELL_S = 60.0
"""Interval between log lines about a continuing outage, in seconds."""


cancelled_before = ContextVar("cancelled before", default=sys.maxsize)
"""Number of cancellations of the task when its `Broker.call` began; outside a call, a value that no count exceeds."""


def num_cancelled() -> int:
    task = asyncio.current_task()
    return task.cancelling() if task else 0


def heed_cancellation() -> None:
    """Raises a cancellation or timeout that was lost. redis-py writes inside asyncio.wait_for, and in Python 3.11 that
    drops a cancellation that arrives just as the write ends."""
    if num_cancelled() > cancelled_before.get():
        raise asyncio.CancelledError


class Outage:
    """The outage state shared by all calls of one Broker. Logs the start and end of an outage if calls are patient."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.where = ""
        self.reason = ""
        """Error of the last failed call."""
        self.answered = False
        """At least one call has succeeded."""
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
"""Replies of a server that was demoted or whose master is away."""
_NO_STANDBY = "NOREPLICAS"
"""Reply of a master that lost its replicas (min-replicas-to-write): another server may be the master by now."""


class _Backoff(AbstractBackoff):
    """redis-py's exponential backoff with its failure count capped: the original overflows beyond 1,023 failures."""

    _of_few = ExponentialWithJitterBackoff(base=0.1, cap=2.0)

    def compute(self, failures: int) -> float:
        return self._of_few.compute(min(failures, 16))


_TLS_ENDED = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
"""TLS errors caused by a server that goes away. Any other TLS error before the first answer is a misconfiguration."""


class RefusedError(RedisError):
    """The user, the password or the TLS configuration is wrong."""


class _Retry(Retry):
    """Retry policy that all connections of a Broker share, and with it their Outage."""

    def __init__(self, outage: Outage, backoff: AbstractBackoff, retries: int) -> None:
        super().__init__(backoff, retries)
        self._outage = outage

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def _refusal(self, error: Exception, whose: str) -> RefusedError | None:
        """The RefusedError for an error that redis-py takes for an outage but that retrying cannot fix, such as a wrong
        password, certificate or key; otherwise None."""
        cause = error.__cause__ or error.__context__
        if isinstance(error, (AuthenticationError, AuthorizationError, NoPermissionError)):
            return RefusedError(f"refuses the user or password of {whose}: {error}")
        if isinstance(cause, ssl.SSLCertVerificationError):
            remedy = "rediss://...?ssl_ca_certs=FILE names the authority to trust"
            return RefusedError(f"shows a certificate that cannot be trusted: {error}; {remedy}")
        if isinstance(cause, ssl.SSLError) and not isinstance(cause, _TLS_ENDED) and not self._outage.answered:
            return RefusedError(f"cannot be reached over TLS: {error}; see redis_url's options")
        return None


class _ServerRetry(_Retry):
    """Retry policy of a server: retries and reports the outage."""

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
                # The current master answers on another connection.
                self._outage.failed(error)
                raise ConnectionError(str(error)) from error
            except (ConnectionError, TimeoutError) as error:
                if refusal := self._refusal(error, "redis_url"):
                    raise refusal from None
                self._outage.failed(error)
                raise

        return await super().call_with_retry(once, *args, **options)


class _SentinelRetry(_Retry):
    """Retry policy of one Sentinel of several: no retries, the next one is asked. _ServerRetry retries all of them."""

    def __init__(self, outage: Outage) -> None:
        super().__init__(outage, NoBackoff(), 0)
        self.reasons: list[str] = []
        """Errors of the Sentinels that the last `discover_master` asked."""

    async def call_with_retry(self, do: Callable[[], Awaitable[Any]], *args: Any, **options: Any) -> Any:
        async def once() -> Any:
            heed_cancellation()
            try:
                return await do()
            except RedisError as error:  # also from a server that is not a Sentinel
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
    """Reconnects to the current master: redis-py keeps a connection that was in use when the master changed."""

    async def ensure_connection(self, connection: Any) -> None:
        if connection.is_connected and (connection.host, connection.port) != self.master_address:
            await connection.disconnect()
        await super().ensure_connection(connection)


class _ToMaster(SentinelManagedConnection):
    """Connection that asks the Sentinels again on every reconnect. redis-py asks them for new connections only (its
    issue 3874) and would reconnect a broken one to its old server, however long that is away."""

    async def connect_to(self, address: tuple[str, int]) -> None:
        """Checks the role: a Sentinel may name a server that is not, or not yet, the master, but answers reads."""
        await super().connect_to(address)  # type: ignore[no-untyped-call]
        await self.send_command("INFO", "replication", check_health=False)
        if b"role:master" not in await self.read_response():
            await self.disconnect()
            raise ConnectionError(f"{self.host}:{self.port}, which a Sentinel names, is not the master")

    async def connect_check_health(self, check_health: bool = True, retry_socket_connect: bool = True) -> None:
        if retry_socket_connect:
            await self.connect()  # type: ignore[no-untyped-call]
        else:  # connect to the server that a Sentinel has just named
            await super().connect_check_health(check_health, retry_socket_connect)


class _ToMasterOverTLS(_ToMaster, SentinelManagedSSLConnection):
    pass


def open_client(url: str, outage: Outage) -> Redis:
    """A client that has opened no connection yet; sets `outage.where` to the server's name. Raises ConfigError, without
    the password, if the URL is wrong."""
    try:
        beyond = "".join(re.split("[/?#]", url.partition("://")[2], maxsplit=1)[1:])
        if not url.startswith("unix:") and ("@" in beyond or "#" in url):
            raise ValueError("the password ends the authority")  # its first digits would become the port
        options: dict[str, Any] = {
            "protocol": 2,
            "socket_connect_timeout": CONNECT_TIMEOUT_S,
            "socket_timeout": REPLY_TIMEOUT_S,
            "health_check_interval": 15,
            "driver_info": None,  # no CLIENT SETINFO: Redis 7.0 lacks it, and no user needs it
            "retry": _ServerRetry(outage),
            "retry_on_error": [ConnectionError, TimeoutError],
        }
        if url.startswith(("redis+sentinel:", "rediss+sentinel:")):
            client = _master(url, outage, options)
        else:
            client = Redis.from_url(url, **options)
            given = client.connection_pool.connection_kwargs
            outage.where = str(given.get("path") or f"{given.get('host', 'localhost')}:{given.get('port', 6379)}")
        # Opens nothing, but rejects unknown options.
        client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
    except (ValueError, TypeError, AttributeError, RedisError) as error:
        # urllib's ValueError quotes the part of the password that it takes for the port.
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
    """A client of the current master. redis-py has no such URL scheme; this is the one that other clients share."""
    parts = urlsplit(url)
    credentials, at, hosts = parts.netloc.rpartition("@")
    path = re.fullmatch(r"/([^/]+)(?:/(\d+))?", parts.path)
    query = parse_qs(parts.query.replace("+", "%2B"))  # a plus is a plus, as in the rest of a URL
    nodes = [urlsplit(f"//{host}") for host in hosts.split(",")]
    if path is None or "db" in query:
        raise RedisError("its path must be /NAME, the name of the master in the Sentinels, or /NAME/DATABASE")
    if not all(node.hostname and node.port != 0 for node in nodes):
        raise RedisError("one of the Sentinels has no host, or port 0")
    if twice := [key for key, values in query.items() if len(values) > 1]:
        raise RedisError(f"{twice[0]} is given twice")
    own = {key: query.pop(f"sentinel_{key}")[0] for key in ("username", "password") if f"sentinel_{key}" in query}
    scheme, name, database = parts.scheme.removesuffix("+sentinel"), path[1], path[2] or 0
    # Everything else is parsed as in any other URL.
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
