"""Limits the number of connections, and how long one may be idle. uvicorn limits neither."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 10.0
"""Longest wait for the line and headers of a request, or for the rest of one that was already answered, in seconds."""
READ_TIMEOUT_S = 60.0
"""Time in which a client must take MIN_READ_BYTES of its answer, or all of it, in seconds."""
MIN_READ_BYTES = 64 * 1024
MAX_HEAD_BYTES = 64 * 1024
"""Largest size of a request's line and headers."""


class Idle:
    """Connections of one server that wait for their clients to send a request or read an answer. Oldest first."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self.silent: dict[Connection, asyncio.TimerHandle] = {}
        self.unread: dict[Connection, asyncio.TimerHandle] = {}

    def make_room(self, num_connections: int, newest: Connection) -> None:
        """If there are too many connections, closes the longest silent one, or else the longest unread one: clients in
        real use send and read at once."""
        if num_connections <= self.max_connections:
            return
        oldest = next((other for other in (*self.silent, *self.unread) if other is not newest), newest)
        does = "sends no request" if oldest in self.silent else "reads no answer"
        logger.warning("%d connections: closed the one that %s for longest", num_connections, does)
        oldest.end()


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with timeouts for clients that do not write or do not read. A connection is unread (there
    are bytes that the client has not taken), silent, or being answered."""

    def __init__(self, idle: Idle, **known: Any) -> None:
        super().__init__(**known)
        self._idle = idle
        self._in_head = False
        self._head_bytes = 0

    def end(self) -> None:
        """Closes the connection at once, and drops what the client has not read."""
        self._forget()
        self.transport.abort()

    # --- callbacks of asyncio and uvicorn -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # asyncio calls pause_writing as soon as anything is unread, resume_writing when nothing is.
        transport.set_write_buffer_limits(high=0)
        super().connection_made(transport)
        self._note()
        self._idle.make_room(len(self.connections), self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

    def data_received(self, data: bytes) -> None:
        goes_on = self._in_head
        super().data_received(data)
        self._head_bytes = self._head_bytes + len(data) if goes_on and self._in_head else 0
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The headers have more than {MAX_HEAD_BYTES} bytes.")
        self._note()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else a trailer after the body, which uvicorn would keep forever
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._in_head = False

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._forget()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget()
        self._note()

    # --------------------------------------------------------------------------------------------------------------

    def _note(self) -> None:
        if self in self._idle.unread or self not in self.connections:
            return
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and not self.transport.is_closing():
            self._forget()
        elif self not in self._idle.silent:
            self._idle.silent[self] = self.loop.call_later(REQUEST_TIMEOUT_S, self.end)

    def _watch(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._idle.unread[self] = self.loop.call_later(READ_TIMEOUT_S, self._check_read, unread)

    def _check_read(self, before: int) -> None:
        taken = before - self.transport.get_write_buffer_size()
        if taken < MIN_READ_BYTES:
            logger.warning("closed a connection: its client took %d bytes in %g s", taken, READ_TIMEOUT_S)
            self.end()
        else:
            self._watch()

    def _forget(self) -> None:
        for connections in self._idle.silent, self._idle.unread:
            if timer := connections.pop(self, None):
                timer.cancel()
