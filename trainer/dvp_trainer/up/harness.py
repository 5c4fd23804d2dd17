"""How dvp-harness plays a run's episodes in the user's environment."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from dvp_rl.contract.errors import ConfigError
from dvp_trainer.config import TrainSettings

from .replica import flags


def harness_command(settings: TrainSettings, **options: object) -> list[str]:
    """The command that starts it; `options`: more of its options."""
    up = settings.up
    given = {"environment": up.environment} | options | up.harness_options
    return [sys.executable, "-m", "dvp_rl.harness", *flags(given)]


def try_environment(settings: TrainSettings, row: Mapping[str, Any]) -> dict[str, Any]:
    """What the environment says of a row: its first messages, its tools, and its step after the row's answer. Raises
    ConfigError."""
    command = harness_command(settings, trial="/dev/stdin")
    done = subprocess.run(command, input=json.dumps(row), capture_output=True, text=True, check=False)
    if done.returncode:
        *_, error = done.stderr.split("dvp-harness: error: ")  # after what the environment prints
        raise ConfigError(error.strip())
    said: dict[str, Any] = json.loads(done.stdout)
    return said
