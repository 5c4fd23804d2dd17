"""Cleanup of stale replicas and consumers. States and results of ended jobs expire by their own TTL."""

from __future__ import annotations

from .broker import Broker


async def sweep_broker(broker: Broker, *, forget_after_s: float = 3600.0) -> int:
    """Removes replicas not seen for `forget_after_s`, and consumers idle for as long that own nothing. Returns the
    number removed. Safe at any time, from any process."""
    return int(await broker.script("sweep", int(forget_after_s * 1000)))
