"""Settings of `dvp-harness`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from dvp_rl.hooks import hook_name
from dvp_rl.http.settings import first_token
from dvp_rl.logs import LogFormat, LogLevel
from dvp_rl.settings import Settings


class HarnessSettings(Settings):
    """Plays the episodes of a training run (episodes.harness) in your environment, or by your agent, through the run's
    replicas."""

    model_config = SettingsConfigDict(env_prefix="DVP_HARNESS__", cli_prog_name="dvp-harness")
    usage: ClassVar[str] = "--environment module:Environment --urls URL[,URL...] [options]"

    environment: Annotated[str, AfterValidator(hook_name)]
    """Your class, as module:Environment, or module:Agent (trainer/HOOKS.md). Each object plays one episode."""
    urls: Annotated[tuple[Annotated[str, Field(pattern=r"^https?://[^/]+$")], ...], NoDecode] = ()
    """http://host:port of the run's replicas, or of a gateway in front of them; comma-separated."""
    trial: Path | None = None
    """File with a row as JSON, e.g. {"prompt": "1+1=", "answer": "2"}. The environment plays it without a model and
    without `urls`: its first messages are printed, and what it says to the row's answer."""
    token: SecretStr = SecretStr("")
    """Their token, of scope harness."""
    token_file: Path | None = None
    """File with that token, instead."""
    workers: Annotated[int, Field(ge=1, le=1024)] = 8
    """Episodes played at the same time, each in a process of its own."""
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    """Longest time of `reset`, of `step`, and of each call of a tool, in seconds."""
    memory_mib: Annotated[int, Field(ge=1)] = 2048
    """Memory that a process may take beyond what it has once the environment is imported. Linux only."""
    max_turns: Annotated[int, Field(ge=1)] = 32
    """Answers of the model after which an episode is cut off. The `play` of an agent may take this many times
    `timeout_s`."""
    patience_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest wait while no replica answers, including at start, in seconds; then the program ends."""
    log_format: LogFormat = LogFormat.TEXT
    """Log lines for people, or as JSON objects."""
    log_level: LogLevel = LogLevel.INFO
    """Least severe messages to log."""

    def read_token(self) -> str:
        """The token to send. Raises ConfigError if its file is unreadable or holds no valid token."""
        return self.token.get_secret_value() if self.token_file is None else first_token("token_file", self.token_file)

    @field_validator("urls", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, (list, tuple)):
            raise ValueError("expected a URL or a list of URLs")
        return tuple(url.strip().rstrip("/") for item in values for url in str(item).split(",") if url.strip())

    @model_validator(mode="after")
    def _has_somebody_to_ask(self) -> Self:
        if not self.urls and self.trial is None:
            raise ValueError("urls: needs at least one URL")
        return self
