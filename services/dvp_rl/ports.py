"""A free port that stays free until its server binds it."""

from __future__ import annotations

import socket
import sys
import weakref

HOST = "127.0.0.1"


class ReservedPort:
    """A loopback port on which nobody listens and which the system gives to no other process, until `release` is called
    or this object is collected. A server that is given this port may listen on it at any time.

    Between a search for a free port and the server's own bind (SGLang binds after it has loaded its model), other
    processes bind and connect, and the system may give any of them that port. A bound socket that does not listen keeps
    it reserved. On Linux a server can bind the same port if both sockets have SO_REUSEADDR, as server sockets have. On
    other systems the server's bind would fail, so the port is released at once.
    """

    def __init__(self, number: int = 0) -> None:
        """`number`: 0 takes any free port. Raises OSError if somebody listens on it."""
        holder = socket.socket()
        self.release = weakref.finalize(self, holder.close)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((HOST, number))
        self.number: int = holder.getsockname()[1]
        if sys.platform != "linux":
            self.release()
