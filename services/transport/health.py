"""The state of the queue, and what to do about it."""

from __future__ import annotations

from services.contract.http import QueueHealth

from .broker import Broker


async def queue_health(broker: Broker) -> QueueHealth:
    """One read-only script, so the numbers belong together. Cheap enough to poll."""
    raise NotImplementedError
