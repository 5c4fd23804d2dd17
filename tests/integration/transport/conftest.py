from __future__ import annotations

import pytest

from services.transport.broker import Broker
from services.transport.groups import GroupQueue
from services.transport.lease import TrainerLease
from services.transport.submission import Submission
from tests.integration.transport.rig import Rig


@pytest.fixture
async def rig(broker: Broker) -> Rig:
    fence = await TrainerLease(broker, "test").acquire()
    return Rig(broker, fence, Submission(broker), GroupQueue(broker, fence=fence))
