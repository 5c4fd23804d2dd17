"""Checkpoints: everything a trainer needs to resume as if it had not been interrupted.

A checkpoint is a folder `step-NNNNNNNN` with `progress.json` (human-readable), `state` (tensors, see state.py) and
`SHA256SUMS` of both, in the format of `sha256sum --check`. It is written elsewhere and renamed into place, created
owner-only, and loaded only if every byte is what was written.

Every trainer has a work folder `.work-TOKEN-*`; everything is renamed out of it and into it. A trainer first removes
the work folders of its predecessors, so a trainer that was stopped and replaced changes nothing when it wakes up.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from dvp_rl.contract.errors import ConfigError, LeaseLostError
from dvp_rl.transport.failpoints import failpoint
from dvp_trainer.disk import unwritable, writing

PROGRESS, STATE, SUMS, CLAIM = "progress.json", "state", "SHA256SUMS", "claim"


@dataclass(frozen=True)
class Progress:
    """State of the run, apart from tensors."""

    step: int = 0
    """Batches trained."""
    weight_steps: int = 0
    """Batches that changed the weights; staleness is counted in these."""
    cursor: int = 0
    """Data positions below this were submitted at least once."""
    outstanding: tuple[str, ...] = ()
    """Ids of train jobs that were issued and have not ended."""
    retries: tuple[tuple[int, int], ...] = ()
    """(position, attempt) to submit again."""
    submitted_length: int = 0
    """Length of the ledger of submitted ids, in bytes; likewise consumed_length."""
    consumed_length: int = 0
    data_fingerprint: str = ""
    """Fingerprint of the data set and its order; the cursor is meaningless under another one."""
    samples: int = 0
    """Sequences trained."""
    seq: int = 0
    """Sequence number of the weights announced last."""
    best: tuple[int, float] | None = None
    """(step, held-out score) of the best evaluation."""


class Checkpoints:
    """The folder of a run's checkpoints. Keeps the last `keep`, and the best one."""

    def __init__(self, root: Path, keep: int, *, create: bool = True) -> None:
        """`create`: makes the folder, for its owner only. Readers leave it as it is."""
        self.root, self.keep = root, keep
        self._work = root / ".work"
        if not create:
            return
        with writing(f"out_dir: {root}", root):
            root.mkdir(parents=True, exist_ok=True)
            root.chmod(0o700)

    def newest_token(self) -> int:
        """The highest fencing token that has claimed the folder; 0 if none has."""
        return max((int(path.name.split("-")[1]) for path in self._entries(".work-*-*")), default=0)

    def claim(self, token: int) -> None:
        """Claims the folder for the holder of the run's lease; from then on no older trainer can save. Call it before
        `load`. Raises LeaseLostError if a newer trainer has claimed it."""
        # Create ours before removing others: of two concurrent claims the newer one wins, and no token is forgotten.
        self._work = self.root / f".work-{token}-{secrets.token_hex(8)}"
        with writing(f"out_dir: {self._work}", self.root):
            self._work.mkdir(mode=0o700)
            (self._work / CLAIM).touch()
            _sync_folder(self.root)
        if self.newest_token() > token:
            shutil.rmtree(self._work)
            raise self._taken()
        for other in self._entries(".work-*"):
            if other != self._work:
                # After the rename, the old owner cannot add files that race with the removal.
                gone = other.rename(self.root / f".gone-{secrets.token_hex(8)}")
                shutil.rmtree(gone, ignore_errors=True)
        for gone in self._entries(".gone-*"):
            shutil.rmtree(gone, ignore_errors=True)

    @property
    def _is_ours(self) -> bool:
        return (self._work / CLAIM).exists()

    def _taken(self) -> LeaseLostError:
        return LeaseLostError(f"another trainer took over {self.root}")

    def steps(self) -> list[int]:
        """Steps of the checkpoints, ascending. Raises ConfigError if the folder is unreadable, so that a run with
        checkpoints never starts over."""
        names = (path.name.removeprefix("step-") for path in self._entries("step-*") if path.is_dir())
        return sorted(int(name) for name in names if name.isdecimal())

    def _entries(self, pattern: str) -> list[Path]:
        """Entries that match the pattern. Raises ConfigError if the folder is unreadable; Path.glob would find none."""
        try:
            return [path for path in self.root.iterdir() if path.match(pattern)]
        except OSError as error:
            raise ConfigError(f"out_dir: {self.root} cannot be read by user {os.geteuid()} ({error})") from None

    def seqs(self) -> list[int]:
        """Sequence numbers under which the weights of the checkpoints were announced."""
        return [self.seq(step) for step in self.steps()]

    def seq(self, step: int) -> int:
        """Likewise of one checkpoint, whichever version of this project wrote it."""
        return int(json.loads((self.folder(step) / PROGRESS).read_text())["seq"])

    def folder(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"

    def save(self, progress: Progress, write_state: Callable[[Path], None]) -> Path:
        """Writes a checkpoint, which is durable on return. `write_state` creates a folder at the path it is given.

        Raises ConfigError (disk full) and leaves earlier checkpoints unchanged, or LeaseLostError if another trainer
        has claimed the folder.
        """
        final = self.folder(progress.step)
        try:
            self._write(final, progress, write_state)
            self._sweep(progress.best[0] if progress.best else None)
        except (OSError, RuntimeError) as error:
            if not self._is_ours:
                raise self._taken() from None
            raise ConfigError(unwritable(f"out_dir: checkpoint {final}", self.root, error)) from error
        return final

    def _write(self, final: Path, progress: Progress, write_state: Callable[[Path], None]) -> None:
        partial = self._work / final.name
        partial.mkdir(mode=0o700)
        try:
            write_state(partial / STATE)
            _write(partial / PROGRESS, json.dumps(asdict(progress), indent=1))
            _write(partial / SUMS, _sums(partial))
            failpoint("checkpoint.before")
            if not self._is_ours:  # write_state may have recreated the missing folder
                raise FileNotFoundError(self._work)
            if final.exists():
                final.rename(self._work / f"{final.name}.old")
            partial.rename(final)
            failpoint("checkpoint.after")
        finally:
            for path in self._work.glob("step-*"):
                shutil.rmtree(path, ignore_errors=True)
        _sync_folder(self.root)

    def load(self, which: Literal["best", "last"] | int = "last") -> tuple[Progress, Path] | None:
        """Progress and state folder of the newest checkpoint, of that with the best held-out score (the newest if there
        are no scores), or of that of a step. None if there is no checkpoint at all. Raises ConfigError if the one asked
        for is missing or damaged."""
        steps = self.steps()
        if not steps:
            return None
        if which == "best":
            newest, state = self._read(steps[-1])
            return (newest, state) if newest.best is None else self.load(newest.best[0])
        if which == "last":
            return self._read(steps[-1])
        if which not in steps:
            raise ConfigError(f"{self.root}: no checkpoint of step {which}; there are {steps}")
        return self._read(which)

    def _read(self, step: int) -> tuple[Progress, Path]:
        folder = self.folder(step)
        try:
            _check_sums(folder)
        except (OSError, ValueError) as error:
            raise unreadable(folder, error) from error
        return self.progress(step), folder / STATE

    def progress(self, step: int) -> Progress:
        """Progress at a checkpoint, whose tensors are not checked. Raises ConfigError."""
        folder = self.folder(step)
        try:
            fields = json.loads((folder / PROGRESS).read_text())
            fields.pop("counters", None)  # earlier versions wrote this field, always empty,
            if "updates" in fields:  # and this name
                fields["weight_steps"] = fields.pop("updates")
            fields["outstanding"] = tuple(fields["outstanding"])
            fields["retries"] = tuple((position, attempt) for position, attempt in fields["retries"])
            fields["best"] = tuple(fields["best"]) if fields["best"] else None
            return Progress(**fields)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise unreadable(folder, error) from error

    def _sweep(self, best: int | None) -> None:
        for step in self.steps()[: -self.keep]:
            if step != best:
                shutil.rmtree(self.folder(step).rename(self._work / f"step-{step}.old"))


def unreadable(folder: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{folder}: unreadable checkpoint ({error}). Move the folder away to resume from the one before")


def _sums(folder: Path) -> str:
    """Checksum lines of all files in the folder, in the format of sha256sum. Files are read in parallel threads."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != SUMS)
    with ThreadPoolExecutor() as threads:
        digests = threads.map(_digest, (folder / name for name in names))
        return "".join(f"{digest}  {name}\n" for digest, name in zip(digests, names, strict=True))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_sums(folder: Path) -> None:
    """Raises ValueError naming the files that differ from what was written, OSError if a file is unreadable."""
    written, found = (folder / SUMS).read_bytes().decode(), _sums(folder)
    if written != found:
        differing = set(written.split("\n")) ^ set(found.split("\n"))
        names = sorted({line.partition("  ")[2] for line in differing})
        raise ValueError(f"{', '.join(names)}: not as {SUMS} lists them")


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
