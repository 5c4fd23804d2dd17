"""Everything a trainer needs to go on as if nothing had happened.

A checkpoint is a folder `step-NNNNNNNN`, written beside and renamed into place, of `progress.json` (for people too),
`state` (tensors, see state.py) and `SHA256SUMS` of both, which `sha256sum --check` reads, too. It is created
owner-only, and used only if every byte is what was written.

Every trainer writes in a folder of its own, `.work-TOKEN-*`, out of which and into which everything is renamed, and
first removes those of its predecessors: one that was stopped, and replaced, changes nothing when it wakes up.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dvp_rl.contract.errors import ConfigError, LeaseLostError
from dvp_rl.transport.failpoints import failpoint
from dvp_trainer.disk import unwritable, writing

PROGRESS, STATE, SUMS, CLAIM = "progress.json", "state", "SHA256SUMS", "claim"


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
        self._work = root / ".work"
        with writing(f"out_dir: {root}", root):
            root.mkdir(parents=True, exist_ok=True)
            root.chmod(0o700)

    def newest_token(self) -> int:
        """The highest fencing token that ever claimed them; 0 if none did."""
        return max((int(path.name.split("-")[1]) for path in self._entries(".work-*-*")), default=0)

    def claim(self, token: int) -> None:
        """Before `load`, by the trainer that holds the run's lease: from here on no other one can save. Raises
        LeaseLostError if a newer one has."""
        # Ours first, then the others: of two that claim at once the newer one stays, and no token is forgotten.
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
                # A rename ends what a plain removal could race with.
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
        """Raises ConfigError if the folder cannot be read: a run that has checkpoints must not begin anew."""
        return sorted(int(path.name.removeprefix("step-")) for path in self._entries("step-*") if path.is_dir())

    def _entries(self, pattern: str) -> list[Path]:
        """Path.glob finds nothing where it may not look."""
        try:
            return [path for path in self.root.iterdir() if path.match(pattern)]
        except OSError as error:
            raise ConfigError(f"out_dir: {self.root} cannot be read by user {os.geteuid()} ({error})") from None

    def seqs(self) -> list[int]:
        """Weight sequence numbers that the checkpoints were announced under."""
        return [int(json.loads((self.folder(step) / PROGRESS).read_text())["seq"]) for step in self.steps()]

    def folder(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"

    def save(self, progress: Progress, write_state: Callable[[Path], None]) -> Path:
        """`write_state` makes a folder of the path it is given. Durable before it returns.

        Raises ConfigError (disk full) and leaves the earlier checkpoints alone, LeaseLostError if another trainer has
        claimed them.
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
            if not self._is_ours:  # write_state makes missing folders anew
                raise FileNotFoundError(self._work)
            if final.exists():
                final.rename(self._work / f"{final.name}.old")
            partial.rename(final)
            failpoint("checkpoint.after")
        finally:
            for path in self._work.glob("step-*"):
                shutil.rmtree(path, ignore_errors=True)
        _sync_folder(self.root)

    def load(self, step: int | None = None) -> tuple[Progress, Path] | None:
        """The newest checkpoint, or that of `step`, and its folder of state. None if there is none at all."""
        steps = self.steps()
        if not steps:
            return None
        if step is not None and step not in steps:
            raise ConfigError(f"{self.root}: no checkpoint of step {step}; there are {steps}")
        folder = self.folder(steps[-1] if step is None else step)
        try:
            _check_sums(folder)
            fields = json.loads((folder / PROGRESS).read_text())
            fields["outstanding"] = tuple(fields["outstanding"])
            fields["retries"] = tuple((position, attempt) for position, attempt in fields["retries"])
            fields["best"] = tuple(fields["best"]) if fields["best"] else None
            return Progress(**fields), folder / STATE
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise unreadable(folder, error) from error

    def _sweep(self, best: int | None) -> None:
        for step in self.steps()[: -self.keep]:
            if step != best:
                shutil.rmtree(self.folder(step).rename(self._work / f"step-{step}.old"))


def unreadable(folder: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{folder}: unreadable checkpoint ({error}). Move the folder away to resume from the one before")


def _sums(folder: Path) -> str:
    """A line for each file in it, as sha256sum writes them. Each file is read on a thread of its own."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != SUMS)
    with ThreadPoolExecutor() as threads:
        digests = threads.map(_digest, (folder / name for name in names))
        return "".join(f"{digest}  {name}\n" for digest, name in zip(digests, names, strict=True))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_sums(folder: Path) -> None:
    """Raises OSError, ValueError naming a file that is not what was written."""
    written, found = (folder / SUMS).read_bytes().decode(), _sums(folder)
    if written != found:
        differing = set(written.split("\n")) ^ set(found.split("\n"))
        names = sorted({line.partition("  ")[2] for line in differing})
        raise ValueError(f"{', '.join(names)}: not what {SUMS} says was written")


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
