"""What nobody needs any more. States and results of ended jobs go by their own time to live."""

from __future__ import annotations

from .broker import Broker


async def sweep_broker(broker: Broker, *, forget_after_s: float = 3600.0) -> int:
    """Forgets replicas unseen for long, and consumers idle for long that own nothing. Returns how many went.
    Safe at any time, from any process."""
    return int(await broker.script("sweep", int(forget_after_s * 1000)))
