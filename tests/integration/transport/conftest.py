from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from dvp_rl.transport.broker import Broker
from dvp_rl.transport.embedded import EmbeddedBroker
from tests.integration.transport.rig import Rig
from tests.integration.transport.world import Parts, connect_parts


@pytest.fixture
async def rig(broker: Broker) -> Rig:
    return await Rig.of(broker)


@pytest.fixture
async def parts(shared_broker: EmbeddedBroker, run_id: str) -> AsyncIterator[Parts]:
    """Connections of all parts. Fails at the end if the broker refused any of them a command."""
    async with connect_parts(shared_broker, run_id) as connected:
        yield connected
