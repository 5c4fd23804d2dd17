"""Settings of `dvp-weights`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from dvp_rl.http.settings import ListenSettings, WeightReader


class UpstreamSection(WeightReader):
    """The dvp-weights to copy from, nearer to the trainer."""

    name: ClassVar[str] = "upstream"
    url: Annotated[str, Field(pattern=r"^https?://[^/]+$")] | None = None
    """Its http://host:port. What it serves is copied to `folder`, and served from there even when it is gone."""


class WeightServerSettings(ListenSettings):
    """Serves a trainer's published weights over HTTP, or a copy of what another server has."""

    model_config = SettingsConfigDict(env_prefix="DVP_WEIGHTS__", cli_prog_name="dvp-weights")
    usage: ClassVar[str] = "--folder FOLDER [options]"

    folder: Path
    """The trainer's weights.folder (by default out_dir/weights), which is only read. With upstream.url: this server's
    own folder, for its copies."""
    upstream: UpstreamSection = UpstreamSection()
    port: Annotated[int, Field(ge=0, le=65535)] = 8200
    """0 takes a free port: see the log, or --port-file."""
