"""Every HTTP application of this project, on a real socket, with and without a token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fastapi import FastAPI

from dvp_rl.http.api_tokens import ApiTokens
from dvp_rl.http.server import bound, http_server
from dvp_rl.http.settings import MAX_REQUESTS
from dvp_rl.logs import LogContext
from dvp_rl.monitor import app as monitor
from dvp_rl.monitor.runs import Runs
from dvp_rl.monitor.settings import MonitorSettings
from dvp_rl.rollout import app as rollout
from dvp_rl.rollout.service import Service
from dvp_rl.rollout.settings import RolloutSettings
from dvp_rl.weights import app as weights
from dvp_trainer.report import prometheus
from tests.kit.processes import ServerThread

AppMaker = Callable[[ApiTokens], FastAPI]


def _rollout(tokens: ApiTokens) -> FastAPI:
    settings = RolloutSettings.load(["--model", "none"])
    return rollout.create_app(Service(settings, LogContext()), tokens, MAX_REQUESTS)


def _monitor(tokens: ApiTokens) -> FastAPI:
    return monitor.create_app(Runs(MonitorSettings.load([])), tokens, MAX_REQUESTS)


def _weights(tokens: ApiTokens) -> FastAPI:
    return weights.create_app(Path("none"), tokens, MAX_REQUESTS)


def _trainer(tokens: ApiTokens) -> FastAPI:
    return prometheus._app(prometheus.PrometheusSink(), tokens, MAX_REQUESTS)


APPS: dict[str, AppMaker] = {
    "dvp-rollout": _rollout,
    "dvp-monitor": _monitor,
    "dvp-weights": _weights,
    "dvp-train (metrics)": _trainer,
}


@contextmanager
def serving(app: FastAPI, max_requests: int = MAX_REQUESTS) -> Iterator[str]:
    """Serves the app on loopback, and yields its URL."""
    with bound("127.0.0.1", 0) as listener:
        http = http_server(app, drain_s=0, max_requests=max_requests)

        async def serve(asked_to_stop: asyncio.Event) -> None:
            serving = asyncio.create_task(http.serve(sockets=[listener]))
            await asked_to_stop.wait()
            http.should_exit = True
            await serving

        server = ServerThread(serve)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.stop()
