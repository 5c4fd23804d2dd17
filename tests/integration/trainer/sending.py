"""A trainer's sender without a trainer."""

from __future__ import annotations

import asyncio
import time
from asyncio import all_tasks
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from services.cancellation import cancel
from services.contract.weights import Announcement, WeightRoute
from services.engines.weight_pieces import PIECE_BYTES
from services.transport.broker import Broker
from services.transport.transfers import Transfers
from tests.kit.wait import until_async
from trainer.config import WeightsSection
from trainer.sender import SERVING, Sender


@asynccontextmanager
async def sender(
    broker: Broker, version: str, folder: Path, *, piece_bytes: int = PIECE_BYTES, send_timeout_s: float = 60
) -> AsyncIterator[None]:
    announced = Announcement(
        version=version, step=1, folder=str(folder), announced_at=time.time(), route=WeightRoute.DISTRIBUTED
    )
    weights = WeightsSection(send_timeout_s=send_timeout_s)
    sending = Sender(lambda: announced, Transfers(broker), weights, "cpu", piece_bytes)
    running = asyncio.create_task(sending.run())
    try:
        yield
    finally:
        await cancel([running])


def sending_processes() -> list[psutil.Process]:
    """Children of this process that send."""
    return [child for child in psutil.Process().children() if _sends(child)]


def _sends(child: psutil.Process) -> bool:
    try:
        return "trainer.sending" in child.cmdline()
    except psutil.Error:  # it has ended
        return False


async def none_sending() -> None:
    """Nor is the sender busy with what is left of one: cancelled then, asyncio would complain of open pipes."""
    await until_async(lambda: not sending_processes() and not any(task.get_name() == SERVING for task in all_tasks()))


async def one_stopped() -> None:
    """A fail point stopped it in the middle of its work."""
    await until_async(lambda: any(p.status() == psutil.STATUS_STOPPED for p in sending_processes()))
