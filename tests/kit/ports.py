"""Ports for servers that tests start, now or later, and for those that never come."""

from __future__ import annotations

from dvp_rl.ports import ReservedPort

_reserved: list[ReservedPort] = []


def free_port() -> int:
    """Nobody listens there but who is told to, for as long as this process lives."""
    _reserved.append(ReservedPort())
    return _reserved[-1].number
