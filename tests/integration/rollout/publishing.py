"""Publishing weights as a trainer does."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from dvp_rl.contract.weights import Announcement, WeightRoute
from dvp_rl.transport.broker import Broker
from dvp_rl.weights.folder import write_manifest
from dvp_rl.weights.registry import WeightRegistry


async def announce(
    broker: Broker,
    fence: int,
    folder: Path,
    model: Path,
    *,
    min_seq: int = 0,
    break_it: bool = False,
    url: str | None = None,
    route: WeightRoute = WeightRoute.FOLDER,
) -> Announcement:
    """Announces a copy of `model` in `folder` as the next version. `break_it`: flips one bit before it is announced."""
    registry = WeightRegistry(broker)
    shutil.copytree(model, folder)
    seq = await registry.next_seq(fence=fence)
    manifest = write_manifest(folder, broker.run_id, seq, step=seq)
    if break_it:
        flip_a_bit(folder / "model.safetensors")
    announcement = Announcement(
        version=str(manifest.version),
        step=seq,
        folder=str(folder),
        url=url,
        min_seq=min_seq,
        announced_at=time.time(),
        route=route,
    )
    await registry.announce(announcement, fence=fence)
    return announcement


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
