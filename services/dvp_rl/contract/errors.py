"""Every error that this project raises on purpose.

    DvpError
    +-- ConfigError            a setting, a file or a folder the user named is wrong
    |   +-- NoBrokerError      no broker answers at redis_url
    +-- RequestError           a request or a record breaks the contract (HTTP 422)
    |   +-- GroupMismatchError a group does not belong to what the trainer trains on
    +-- NotFoundError          no such job (HTTP 404)
    +-- OverloadedError        admission is closed; try again after `retry_after_s` (HTTP 429)
    +-- UnavailableError       not ready, or a peer did not answer in time (HTTP 503)
    +-- EngineError            generation failed; counts as one delivery of the job
    +-- WeightError            weights are missing, incomplete, corrupt or do not fit; older ones stay in service
    |   +-- WeightGoneError    this version was deleted or never existed (HTTP 404)
    +-- LeaseLostError         the caller no longer owns the entry, or was fenced off by another trainer

Messages name the field or file, the value seen and what is allowed, and are shown to the user without a traceback.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any, Self


class DvpError(Exception):
    """Root of the tree above."""


class ConfigError(DvpError, ValueError):
    pass


class NoBrokerError(ConfigError):
    pass


class RequestError(DvpError, ValueError):
    """`errors`: one `{"field", "value", "allowed"}` per offending field, as in the problem document. `code`: OpenAI's
    code of the error, if it has one that clients act on."""

    def __init__(self, message: str, errors: list[dict[str, object]] | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.errors = errors or []
        self.code = code

    @classmethod
    def at(cls, field: str, value: object, allowed: str, code: str | None = None) -> Self:
        """The error of one field."""
        error: dict[str, object] = {"field": field, "value": value, "allowed": allowed}
        return cls(f"{field}: got {value}, allowed: {allowed}", [error], code)


class GroupMismatchError(RequestError):
    pass


class NotFoundError(DvpError, LookupError):
    pass


class OverloadedError(DvpError):
    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class UnavailableError(DvpError):
    pass


class EngineError(DvpError):
    pass


class WeightError(DvpError):
    pass


class WeightGoneError(WeightError):
    pass


class LeaseLostError(DvpError):
    pass


REFUSALS = {errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO}


def is_refusal(error: BaseException) -> bool:
    """Whether the operating system refused an operation: too many open files, missing permissions, a full or failing
    volume. The program is not at fault, so a traceback would not help."""
    return isinstance(error, OSError) and error.errno in REFUSALS


def reason(item: Mapping[str, Any]) -> str:
    """Why pydantic refuses a field: its own words, or a validator's. `item`: one of ValidationError.errors()."""
    return str(item["msg"]).removeprefix("Value error, ")
