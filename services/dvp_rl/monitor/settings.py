"""Settings of `dvp-queue` and `dvp-monitor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from dvp_rl.contract.weights import RUN_ID
from dvp_rl.http.settings import ListenSettings
from dvp_rl.settings import Settings
from dvp_rl.transport.urls import DEFAULT_URL, RedisUrl

DEFAULT_RUN = "default"


class QueueSettings(Settings):
    model_config = SettingsConfigDict(env_prefix="DVP_QUEUE__", cli_prog_name="dvp-queue")

    redis_url: RedisUrl = DEFAULT_URL
    """redis://[user:password@]host:port/0 of the broker, or redis+sentinel://[...@]host:port,host:port/NAME."""
    run_id: Annotated[str, Field(pattern=RUN_ID)] = DEFAULT_RUN
    """The training run."""


class MonitorSettings(ListenSettings):
    """Serves the live page of a run's queue, and its metrics for Prometheus."""

    model_config = SettingsConfigDict(env_prefix="DVP_MONITOR__", cli_prog_name="dvp-monitor")

    redis_url: RedisUrl = DEFAULT_URL
    """redis://[user:password@]host:port/0 of the broker, or redis+sentinel://[...@]host:port,host:port/NAME."""
    run_id: Annotated[str, Field(pattern=RUN_ID)] = DEFAULT_RUN
    """The training run to show first, and in /metrics. The page also shows the other runs of the broker."""
    metrics_file: Path | None = None
    """The trainer's metrics.jsonl, for the training curves; it may appear later. With {run} in place of the run's id,
    every run has its curves."""
    completions_file: Path | None = None
    """The trainer's completions.jsonl, as for metrics_file: whoever may open the page can then read prompts and
    completions."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    """0 takes a free port: see the log, or --port-file."""
    interval_s: Annotated[float, Field(ge=0.1, le=60)] = 1.0
    """Seconds between two polls of a run, however many people watch it."""
    max_viewers: Annotated[int, Field(ge=1)] = 256
    """Pages that can be open at the same time, and other runs than run_id that are polled."""

    def files(self, run_id: str) -> tuple[Path | None, Path | None]:
        """The metrics and the completions of a run."""
        metrics, completions = self.metrics_file, self.completions_file
        return self._of_run(metrics, run_id), self._of_run(completions, run_id)

    def _of_run(self, file: Path | None, run_id: str) -> Path | None:
        if file is None or "{run}" in str(file):
            return file and Path(str(file).replace("{run}", run_id))
        return file if run_id == self.run_id else None
