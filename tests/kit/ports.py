"""Ports for servers that tests start, at once, later or never."""

from __future__ import annotations

from dvp_rl.ports import ReservedPort

_reserved: list[ReservedPort] = []


def free_port() -> int:
    """A port reserved as long as this process lives: only a server that is given it listens there."""
    _reserved.append(ReservedPort())
    return _reserved[-1].number
