"""What `dvp-weights` can be told."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.http.settings import ListenSettings


class WeightServerSettings(ListenSettings):
    model_config = SettingsConfigDict(env_prefix="DVP_WEIGHTS__", cli_prog_name="dvp-weights")

    folder: Path
    """The trainer's weights.folder (by default out_dir/weights). Only read."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8200
    """0 takes a free port: see the log, or --port-file."""
