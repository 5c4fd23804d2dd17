"""Base class of everything that crosses a process boundary, and its two codecs.

JSON (HTTP): pydantic's own. msgpack (Redis): named fields, arrays as raw little-endian buffers, and the schema version
in front, so that a reader with another schema refuses the record instead of guessing.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, Self

import msgpack
from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import RequestError, reason

SCHEMA_VERSION = 1
MAX_SHOWN = 80
"""Longest value that an error repeats, in characters."""


class Record(BaseModel):
    """Immutable. Unknown fields are errors. Two records are equal if their encodings are."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    def to_bytes(self) -> bytes:
        encoded: bytes = msgpack.packb([SCHEMA_VERSION, self.model_dump()], default=_array_bytes)
        return encoded

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The decoded record. Raises RequestError that names the record and every bad field."""
        try:
            version, fields = msgpack.unpackb(data)
        except Exception as error:  # noqa: BLE001 - msgpack raises many types for a damaged buffer
            raise RequestError(f"{cls.__name__}: not a msgpack record of this project ({error})") from None
        if version != SCHEMA_VERSION:
            raise RequestError(f"{cls.__name__}: schema version {version!r}, this build reads {SCHEMA_VERSION}")
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise RequestError(describe(cls.__name__, error)) from None

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, Record) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash(self.to_bytes())


def _array_bytes(value: Any) -> bytes:
    """What is stored of a value that msgpack does not know, which must be an array."""
    view = memoryview(value)
    if view.ndim != 1:
        raise TypeError(f"{type(value).__name__} has no msgpack form")
    return view.tobytes()


def describe(what: str, error: ValidationError) -> str:
    """One line per bad field: where, why, and the value seen. Long strings and containers may hold a prompt and these
    lines are logged, so only their type and size are shown."""
    lines = [
        f"{what}: {'.'.join(map(str, item['loc'])) or 'record'}: {reason(item)}, got {_brief(item['input'])}"
        for item in error.errors(include_url=False, include_context=False)
    ]
    return "\n".join(lines)


def _brief(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float)) or (isinstance(value, str) and len(value) <= MAX_SHOWN):
        return f"{value!r:.{MAX_SHOWN}}"
    size = f" of {len(value)}" if isinstance(value, Sized) else ""
    return f"{type(value).__name__}{size}"
