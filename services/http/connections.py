"""How long a connection may do nothing, and how many there may be. uvicorn bounds neither."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 10.0
"""For the line and the headers of a request, from the connection or the last answer on."""
READ_TIMEOUT_S = 60.0
"""A client takes MIN_READ_BYTES of its answer in this time, or all of it."""
MIN_READ_BYTES = 64 * 1024


class Waiting:
    """The connections of one server that have sent no complete request, the oldest first."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self._since: dict[Connection, asyncio.TimerHandle] = {}

    def add(self, connection: Connection) -> None:
        if connection not in self._since:
            loop = asyncio.get_running_loop()
            self._since[connection] = loop.call_later(REQUEST_TIMEOUT_S, connection.transport.abort)

    def remove(self, connection: Connection) -> None:
        if timer := self._since.pop(connection, None):
            timer.cancel()

    def make_room(self, num_connections: int) -> None:
        """Closes the oldest if there are too many: whoever has something to ask does so at once."""
        if num_connections > self.max_connections and self._since:
            oldest = next(iter(self._since))
            logger.warning("%d connections: closed the one that sends no request for longest", num_connections)
            self.remove(oldest)
            oldest.transport.abort()


class Connection(H11Protocol):
    """uvicorn's own, without its patience with clients that do not write, or do not read. h11 bounds the headers, too;
    uvicorn's faster parser does not."""

    def __init__(self, waiting: Waiting, **known: Any) -> None:
        super().__init__(**known)
        self._waiting = waiting
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._note()
        self._waiting.make_room(len(self.connections))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._waiting.remove(self)
        self._stop_watching()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch(self.transport.get_write_buffer_size())
        self._note()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching()
        self._note()

    def _note(self) -> None:
        """Waits for a request, or not any longer."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering or self._unread is not None:
            self._waiting.remove(self)
        else:
            self._waiting.add(self)

    def _watch(self, unread: int) -> None:
        self._unread = self.loop.call_later(READ_TIMEOUT_S, self._check_read, unread)

    def _check_read(self, before: int) -> None:
        unread = self.transport.get_write_buffer_size()
        if before - unread < MIN_READ_BYTES:
            logger.warning("closed a connection: its client took %d bytes in %g s", before - unread, READ_TIMEOUT_S)
            self.transport.abort()
        else:
            self._watch(unread)

    def _stop_watching(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
