"""Settings that all listening services share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode

from dvp_rl.contract.errors import ConfigError, WeightError
from dvp_rl.logs import LogFormat, LogLevel
from dvp_rl.loopback import is_loopback
from dvp_rl.settings import Section, Settings

from .api_tokens import ApiTokens, check_token, read_tokens

MAX_REQUESTS = 512
"""Requests that one service answers at the same time, by default."""


class Listening(BaseModel):
    """Where a service listens, and who may call it."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs tokens."""
    port: int | None = None
    token: Annotated[tuple[SecretStr, ...], NoDecode] = ()
    """Tokens that may do everything; comma-separated in the environment."""
    token_folder: Path | None = None
    """Folder of callers' tokens, in files SCOPE/NAME (services/dvp_rl/http/README.md). Reread while the service
    runs."""
    max_requests: Annotated[int, Field(ge=1)] = MAX_REQUESTS
    """HTTP requests that are answered at the same time; further ones get 429."""

    @field_validator("token", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, (list, tuple)):
            raise ValueError("expected a token or a list of tokens")
        if not all(isinstance(item, (str, SecretStr)) for item in values):
            raise ValueError("every token must be a string")
        tokens = [item.get_secret_value() if isinstance(item, SecretStr) else item for item in values]
        tokens = [part.strip() for item in tokens for part in item.split(",") if part.strip()]
        for token in tokens:
            check_token(token)
        return tuple(tokens)

    @model_validator(mode="after")
    def _closed(self) -> Self:
        if self.port is not None and not is_loopback(self.host) and not self.token and self.token_folder is None:
            raise ValueError(
                f"host {self.host!r} is reachable from other machines: name a token_folder, set a token in the "
                f"environment ({self.token_variable()}), or listen on 127.0.0.1"
            )
        return self

    @classmethod
    def token_variable(cls) -> str:
        raise NotImplementedError

    def tokens(self) -> ApiTokens:
        """The accepted tokens. Raises ConfigError if the folder is unreadable, empty, or holds anything but tokens."""
        return ApiTokens([token.get_secret_value() for token in self.token], self.token_folder)


class WeightReader(Section):
    """Credentials for fetching from dvp-weights."""

    name: ClassVar[str] = "weights"
    """Name of the section, for error messages."""
    token: SecretStr = SecretStr("")
    """Token for dvp-weights, of scope weights."""
    token_file: Path | None = None
    """File with that token; of several, the first is used. Reread for every download."""

    def read_token(self) -> str:
        """The token to send. Raises WeightError if the file is unreadable or holds no valid token."""
        if self.token_file is None:
            return self.token.get_secret_value()
        try:
            return first_token(f"{self.name}.token_file", self.token_file)
        except ConfigError as error:
            raise WeightError(str(error)) from None


def first_token(setting: str, file: Path) -> str:
    """The first token of a file. Raises ConfigError if the file is unreadable or holds no valid token."""
    try:
        return read_tokens(file)[0]
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{setting} {file}: {reason}") from None


class ListenSettings(Settings, Listening):  # type: ignore[misc]  # pydantic merges both configurations
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """0 takes a free port: see the log, or --port-file."""
    port_file: Path | None = None
    """File to write the port to once it is bound; removed at exit."""

    log_format: LogFormat = LogFormat.TEXT
    """Log lines for people, or as JSON objects."""
    log_level: LogLevel = LogLevel.INFO
    """Least severe messages to log."""

    @classmethod
    def token_variable(cls) -> str:
        return f"{cls.model_config['env_prefix']}TOKEN"
