"""Validation of stream entry ids given by users."""

from __future__ import annotations

import re

from dvp_rl.contract.errors import RequestError

ENTRY_ID = re.compile(r"([0-9]{1,20})-([0-9]{1,20})")
MAX_PART = 2**64 - 1


def checked(entry_id: str) -> str:
    """`entry_id` unchanged. Raises RequestError unless it is a valid id of a stream entry."""
    parts = ENTRY_ID.fullmatch(entry_id)
    if parts is None or not 0 < max(map(int, parts.groups())) <= MAX_PART:
        raise RequestError(f"entry id {entry_id[:80]!r}: expected one like 1731950000000-0, as the list shows it")
    return entry_id
