"""The setting that names a broker (connection.py explains its forms). Imports no client: commands answer at once."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

DEFAULT_URL = "redis://127.0.0.1:6379/0"
_SCHEMES = ("redis://", "rediss://", "unix://", "redis+sentinel://", "rediss+sentinel://")


def _check_scheme(url: str) -> str:
    if not url.startswith(_SCHEMES):
        raise ValueError(f"must start with {', '.join(_SCHEMES[:-1])} or {_SCHEMES[-1]}")
    return url


RedisUrl = Annotated[str, AfterValidator(_check_scheme)]
