"""A real HTTP server that answers as scripted."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Seen(NamedTuple):
    """A request."""

    body: Any
    headers: Mapping[str, str]


class Script(BaseHTTPRequestHandler):
    """Answers with the next of `answers`: (status, headers, body), or None to hang up."""

    answers: list[tuple[int, dict[str, str], object] | None]
    seen: list[Seen]
    before: Callable[[], object]

    def answer(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        self.seen.append(Seen(json.loads(self.rfile.read(length) or "{}"), self.headers))
        self.before()
        answer = self.answers.pop(0) if self.answers else (500, {}, "the script has ended")
        if answer is None:
            self.close_connection = True
            return
        status, headers, body = answer
        content = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = answer  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 256


@contextmanager
def scripted(
    *answers: tuple[int, dict[str, str], object] | None, before: Callable[[], object] = lambda: None
) -> Iterator[tuple[str, list[Seen]]]:
    """The address of a real server with that script, and the requests that it saw. `before`: is called before each
    answer."""
    seen: list[Seen] = []
    handler = type("Handler", (Script,), {"answers": list(answers), "seen": seen, "before": staticmethod(before)})
    with Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", seen
        finally:
            server.shutdown()
            thread.join()
