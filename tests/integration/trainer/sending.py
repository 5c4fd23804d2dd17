"""A trainer's sender without a trainer."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import time
from asyncio import all_tasks
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from dvp_rl.cancellation import cancel
from dvp_rl.contract.weights import Announcement, WeightRoute
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.failpoints import VARIABLE
from dvp_rl.weights.pieces import PIECE_BYTES
from dvp_rl.weights.transfers import Transfers
from dvp_trainer.config import WeightsSection
from dvp_trainer.publish.send_process import Plan, serve
from dvp_trainer.publish.sender import SERVING, Sender, address_of
from tests.kit.forked import Service, import_everything
from tests.kit.wait import WITHIN_S, until_async


@asynccontextmanager
async def sender(
    broker: Broker,
    version: str,
    folder: Path,
    *,
    device: str = "cpu",
    piece_bytes: int = PIECE_BYTES,
    send_timeout_s: float = 60,
) -> AsyncIterator[None]:
    announced = Announcement(
        version=version, step=1, folder=str(folder), announced_at=time.time(), route=WeightRoute.DISTRIBUTED
    )
    weights = WeightsSection(send_timeout_s=send_timeout_s)
    sending = Sender(lambda: announced, Transfers(broker), weights, device, piece_bytes)
    import_everything()
    running = asyncio.create_task(sending.run())
    try:
        yield
    finally:
        await cancel([running])


def make_plan(model: Path, *, piece_bytes: int = PIECE_BYTES) -> Plan:
    return Plan(
        folder=str(model),
        host=address_of("lo"),
        interface="lo",
        size=2,
        group=uuid4().hex,
        backend="gloo",
        device="cpu",
        piece_bytes=piece_bytes,
        timeout_s=WITHIN_S,
    )


def sending_processes() -> list[psutil.Process]:
    """Child processes that send weights."""
    pids = {child.pid for child in multiprocessing.active_children() if not isinstance(child, Service)}
    return [process for process in psutil.process_iter(["status"]) if process.pid in pids]


def stop_at(monkeypatch: pytest.MonkeyPatch, points: str) -> None:
    """Sets fail points of sending processes."""
    monkeypatch.setattr("dvp_trainer.publish.sender.serve", partial(_serve_until, points))


def _serve_until(points: str, plan: Plan, link: socket.socket) -> None:
    os.environ[VARIABLE] = points
    serve(plan, link)


async def none_sending() -> None:
    """Waits until nothing sends and the sender has cleaned up: cancelled earlier, asyncio would warn of open pipes."""
    await until_async(lambda: not sending_processes() and not any(task.get_name() == SERVING for task in all_tasks()))


async def one_stopped() -> None:
    """Waits until a fail point has stopped a sending process."""
    await until_async(lambda: any(p.info["status"] == psutil.STATUS_STOPPED for p in sending_processes()))
