"""The folder of one demo run: claimed by one launcher at a time, and read back when the trainer is done."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from dvp_rl.contract.errors import ConfigError
from dvp_trainer.up.launch import locked


@dataclass(frozen=True)
class RunFolder:
    path: Path
    earlier: Path | None = None
    """Where the run that was here lies now."""

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    def progress(self) -> dict[str, Any]:
        """progress.json of the newest checkpoint. Raises ConfigError if there is no checkpoint."""
        files = sorted(self.path.glob("checkpoints/step-*/progress.json"))
        if not files:
            raise ConfigError(f"{self.path}: the trainer left no checkpoint; what it said says why")
        progress: dict[str, Any] = json.loads(files[-1].read_text())
        return progress

    def submitted(self, progress: dict[str, Any]) -> list[str]:
        """Ids of the jobs that the checkpoint records as submitted."""
        return _job_ids(self.path / "submitted.jsonl", progress["submitted_length"])

    def consumed(self, progress: dict[str, Any]) -> list[str]:
        """Ids of the jobs that the checkpoint covers: trained, or given up for a reason that the file states."""
        return _job_ids(self.path / "consumed.jsonl", progress["consumed_length"])


@contextmanager
def claim(path: Path) -> Iterator[RunFolder]:
    """Claims an empty folder at `path`. An earlier run there moves to `<path>-1`, or the first number that is free.

    Raises ConfigError if another launcher uses the folder, if what is there is not a run of the demo, or if the file
    system refuses.
    """
    path = path.absolute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The lock lies beside the folder, which is moved. The kernel releases it however the launcher ends.
        with path.with_name(f".{path.name}.lock").open("w") as lock:
            _lock(lock.fileno(), path)
            if path.exists() and not _is_run(path):
                raise ConfigError(f"--out {path} is not a run of the demo; move it away or name another folder")
            earlier = None
            if path.exists() and any(path.iterdir()):
                numbered = (path.with_name(f"{path.name}-{number}") for number in count(1))
                with locked(path):  # `dvp-train up` may have gone on with it
                    earlier = path.rename(next(folder for folder in numbered if not folder.exists()))
            run = RunFolder(path, earlier)
            run.logs.mkdir(parents=True, exist_ok=True)
            yield run
    except OSError as error:
        raise ConfigError(f"--out {path}: {error}") from None


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"--out {path}: another demo is running there; stop it or name another folder") from None


def _is_run(folder: Path) -> bool:
    return folder.is_dir() and ((folder / "logs").is_dir() or not any(folder.iterdir()))


def _job_ids(ledger: Path, length: int) -> list[str]:
    """Job ids in the first `length` bytes; the checkpoint does not cover later lines."""
    with ledger.open("rb") as file:
        return [json.loads(line)["job_id"] for line in file.read(length).splitlines()]
