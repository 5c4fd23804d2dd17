"""Everything a trainer needs to go on as if nothing had happened.

A checkpoint is a folder `step-NNNNNNNN`, written beside and renamed into place, of `progress.json` (for people too) and
`state` (tensors, see state.py). It is created owner-only and trusted.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from services.contract.errors import ConfigError

PROGRESS, STATE = "progress.json", "state"


@dataclass(frozen=True)
class Progress:
    """Where the run stands, apart from tensors."""

    step: int = 0
    """Batches trained."""
    updates: int = 0
    """Batches that changed the weights; staleness is counted in these."""
    cursor: int = 0
    """Data positions below this were submitted at least once."""
    outstanding: tuple[str, ...] = ()
    """Train job ids submitted and neither trained nor dropped nor dead."""
    retries: tuple[tuple[int, int], ...] = ()
    """(position, attempt) waiting to be submitted again."""
    submitted_length: int = 0
    """Length of the ledger of submitted ids, in bytes; likewise of the consumed ones."""
    consumed_length: int = 0
    data_fingerprint: str = ""
    """Of the data set and its order: the cursor means nothing under another one."""
    samples: int = 0
    """Sequences trained."""
    seq: int = 0
    """Weight sequence number announced last."""
    best: tuple[int, float] | None = None
    """(step, held-out score) of the best evaluation."""
    counters: dict[str, int] = field(default_factory=dict)


class Checkpoints:
    """The folder of a run's checkpoints; the last `keep` stay, and the best one."""

    def __init__(self, root: Path, keep: int) -> None:
        self.root, self.keep = root, keep
        root.mkdir(parents=True, exist_ok=True)
        root.chmod(0o700)

    def steps(self) -> list[int]:
        return sorted(int(path.name.removeprefix("step-")) for path in self.root.glob("step-*") if path.is_dir())

    def seqs(self) -> list[int]:
        """Weight sequence numbers that the checkpoints were announced under."""
        return [int(json.loads((self.folder(step) / PROGRESS).read_text())["seq"]) for step in self.steps()]

    def folder(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"

    def save(self, progress: Progress, write_state: Callable[[Path], None]) -> Path:
        """`write_state` makes a folder of the path it is given. Durable before it returns.

        Raises OSError (disk full) and leaves the earlier checkpoints alone.
        """
        final = self.folder(progress.step)
        partial = self.root / f".{final.name}.{os.getpid()}"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(mode=0o700)
            write_state(partial / STATE)
            with (partial / PROGRESS).open("w") as file:
                json.dump(asdict(progress), file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _sync_folder(self.root)
        self._sweep(progress.best[0] if progress.best else None)
        return final

    def load(self, step: int | None = None) -> tuple[Progress, Path] | None:
        """The newest checkpoint, or that of `step`, and its folder of state. None if there is none at all."""
        steps = self.steps()
        if not steps:
            return None
        if step is not None and step not in steps:
            raise ConfigError(f"{self.root}: no checkpoint of step {step}; there are {steps}")
        folder = self.folder(steps[-1] if step is None else step)
        try:
            fields = json.loads((folder / PROGRESS).read_text())
        except (OSError, ValueError) as error:
            raise unreadable(folder, error) from error
        fields["outstanding"] = tuple(fields["outstanding"])
        fields["retries"] = tuple((position, attempt) for position, attempt in fields["retries"])
        fields["best"] = tuple(fields["best"]) if fields["best"] else None
        return Progress(**fields), folder / STATE

    def _sweep(self, best: int | None) -> None:
        for step in self.steps()[: -self.keep]:
            if step != best:
                shutil.rmtree(self.folder(step))


def unreadable(folder: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{folder}: unreadable checkpoint ({error}). Move the folder away to resume from the one before")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
