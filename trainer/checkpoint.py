"""Everything a trainer needs to go on as if nothing had happened.

A checkpoint is a folder `step-NNNNNNNN` of two files, written beside and renamed into place: `progress.json` (for
people too) and `state.pt` (tensors; read with weights_only=True). The folder is created owner-only and trusted.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from services.contract.errors import ConfigError

PROGRESS, STATE = "progress.json", "state.pt"


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

    def save(self, progress: Progress, state: dict[str, Any]) -> Path:
        """Durable before it returns. Raises OSError (disk full) and leaves the earlier checkpoints alone."""
        final = self.folder(progress.step)
        partial = self.root / f".{final.name}.{os.getpid()}"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(mode=0o700)
            with (partial / STATE).open("wb") as file:
                torch.save(state | {"rng": rng_state()}, file)
                os.fsync(file.fileno())
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

    def load(self, step: int | None = None) -> tuple[Progress, dict[str, Any]] | None:
        """The newest checkpoint, or that of `step`. None if there is none at all. See `restore_rng` for the RNG."""
        steps = self.steps()
        if not steps:
            return None
        if step is not None and step not in steps:
            raise ConfigError(f"{self.root}: no checkpoint of step {step}; there are {steps}")
        folder = self.folder(steps[-1] if step is None else step)
        try:
            fields = json.loads((folder / PROGRESS).read_text())
            state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ConfigError(
                f"{folder}: unreadable checkpoint ({error}). Move the folder away to resume from the one before"
            ) from error
        fields["outstanding"] = tuple(fields["outstanding"])
        fields["retries"] = tuple((position, attempt) for position, attempt in fields["retries"])
        fields["best"] = tuple(fields["best"]) if fields["best"] else None
        return Progress(**fields), state

    def _sweep(self, best: int | None) -> None:
        for step in self.steps()[: -self.keep]:
            if step != best:
                shutil.rmtree(self.folder(step))


def rng_state() -> dict[str, Any]:
    """torch's generators: the only ones the trainer draws from (dropout, where a model has it)."""
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
