"""What every service that listens can be told."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode

from services.contract.errors import ConfigError
from services.logs import LogFormat, LogLevel
from services.loopback import is_loopback
from services.settings import Settings

MAX_REQUESTS = 512
"""Answered at the same time by one service, unless it says otherwise."""


def _check_scheme(url: str) -> str:
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError("must start with redis://, rediss:// or unix://")
    return url


RedisUrl = Annotated[str, AfterValidator(_check_scheme)]


class ListenSettings(Settings):
    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs a token."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """0 takes a free port: see the log, or --port-file."""
    port_file: Path | None = None
    """Where to write the port once it is bound; removed at exit."""
    token: Annotated[tuple[SecretStr, ...], NoDecode] = ()
    """Accepted API tokens, several for rotation; comma-separated in the environment."""
    token_file: Path | None = None
    """File with one accepted API token per line."""

    log_format: LogFormat = LogFormat.TEXT
    log_level: LogLevel = LogLevel.INFO

    @field_validator("token", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, (list, tuple)):
            raise ValueError("expected a token or a list of tokens")
        if not all(isinstance(item, (str, SecretStr)) for item in values):
            raise ValueError("every token must be a string")
        tokens = [item.get_secret_value() if isinstance(item, SecretStr) else item for item in values]
        return tuple(part.strip() for item in tokens for part in item.split(",") if part.strip())

    @model_validator(mode="after")
    def _closed(self) -> Self:
        if not is_loopback(self.host) and not self.token and self.token_file is None:
            raise ValueError(
                f"host {self.host!r} is reachable from other machines: set a token "
                f"({self.model_config['env_prefix']}TOKEN or --token-file), or listen on 127.0.0.1"
            )
        return self

    def tokens(self) -> tuple[str, ...]:
        """Every accepted token. Raises ConfigError if the token file is unreadable or empty."""
        listed = tuple(token.get_secret_value() for token in self.token)
        if self.token_file is None:
            return listed
        try:
            lines = self.token_file.read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"token_file {self.token_file}: {error}") from None
        if not lines:
            raise ConfigError(f"token_file {self.token_file}: holds no token; expected one per line")
        return (*listed, *lines)
