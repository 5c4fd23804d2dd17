"""How dvp-harness plays a run's episodes in the user's environment."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from tempfile import TemporaryFile
from typing import IO, Any

from dvp_rl.contract.errors import ConfigError
from dvp_trainer.config import TrainSettings

from .replica import flags


def harness_command(settings: TrainSettings, **options: object) -> list[str]:
    """The command that starts it; `options`: more of its options."""
    up = settings.up
    given = {"environment": up.environment} | options | up.harness_options
    return [sys.executable, "-m", "dvp_rl.harness", *flags(given)]


def try_environment(settings: TrainSettings, row: Mapping[str, Any]) -> dict[str, Any]:
    """What the environment says of a row: a Said of dvp_rl.harness.trial. Raises ConfigError."""
    command = harness_command(settings, trial="/dev/stdin")
    # Files: what the environment leaves running would keep pipes open.
    with TemporaryFile() as output, TemporaryFile() as errors:
        code = subprocess.run(
            command, input=json.dumps(row).encode(), stdout=output, stderr=errors, check=False
        ).returncode
        printed, complaint = (_read(file) for file in (output, errors))
    if code:
        _, _, error = f"\n{complaint}".rpartition("\ndvp-harness: error: ")  # after what the environment prints
        raise ConfigError(error.strip() or f"dvp-harness ended with exit status {code}")
    try:
        said: dict[str, Any] = json.loads(printed)
    except ValueError:
        raise ConfigError(f"dvp-harness plays nothing with these options: it prints:\n{printed[:200]}") from None
    return said


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
