from __future__ import annotations

import pytest

from dvp_rl.contract.weights import Announcement
from dvp_rl.transport import health
from dvp_rl.transport.broker import Broker
from dvp_rl.weights.registry import WeightRegistry
from tests.integration.monitor.process import stage
from tests.integration.transport.rig import Rig
from tests.kit.wait import WITHIN_S


@pytest.fixture
async def rig(broker: Broker) -> Rig:
    return await Rig.of(broker)


@pytest.fixture
async def staged(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """A run in progress with three dead letters; see `stage`. Its processes send no more heartbeats, and count as
    neither lost nor silent."""
    monkeypatch.setattr(health, "LOST_S", WITHIN_S)
    monkeypatch.setattr(health, "BEATING_S", WITHIN_S)
    await stage(rig)
    version = f"{rig.run_id}:7:ab"
    announcement = Announcement(version=version, step=7, folder="/weights", min_seq=7, announced_at=1.0)
    await WeightRegistry(rig.broker).announce(announcement, fence=rig.fence)
    return rig
