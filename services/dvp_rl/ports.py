"""A free port that is still free when its server comes."""

from __future__ import annotations

import socket
import sys
import weakref

HOST = "127.0.0.1"


class ReservedPort:
    """A port of loopback on which nobody listens and which the system gives to nobody else, until `release` or the end
    of this object. A server that names it may listen there at any time.

    Between a look for a free port and the server's own bind (SGLang's comes when its model is loaded) other processes
    bind and connect, and any of them may be given that port. A socket that is bound and does not listen keeps it. On
    Linux a server can bind to the same port if both sockets have SO_REUSEADDR, as those of servers have. Elsewhere it
    could not, so nothing is kept.
    """

    def __init__(self, number: int = 0) -> None:
        """0: any. Raises OSError if somebody listens there."""
        holder = socket.socket()
        self.release = weakref.finalize(self, holder.close)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((HOST, number))
        self.number: int = holder.getsockname()[1]
        if sys.platform != "linux":
            self.release()
