"""What nobody needs any more."""

from __future__ import annotations

from .broker import Broker


async def sweep_broker(broker: Broker, *, forget_after_s: float = 3600.0) -> int:
    """Forgets replicas unseen for long and their consumers that own nothing. Returns how many keys and consumers went.
    Safe at any time, from any process."""
    raise NotImplementedError
