from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from dvp_rl.transport.broker import Broker
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.groups import GroupQueue
from dvp_rl.transport.lease import TrainerLease
from dvp_rl.transport.submission import Submission
from tests.integration.transport.rig import Rig
from tests.integration.transport.world import Parts, connect_parts


@pytest.fixture
async def rig(broker: Broker) -> Rig:
    fence = await TrainerLease(broker, "test").acquire()
    return Rig(broker, fence, Submission(broker), GroupQueue(broker, fence=fence))


@pytest.fixture
async def parts(shared_broker: EmbeddedBroker, run_id: str) -> AsyncIterator[Parts]:
    """Connections of all parts. Fails at the end if the broker refused any of them a command."""
    async with connect_parts(shared_broker, run_id) as connected:
        yield connected
