"""`dvp-train` that also records, for the audit, every batch that it is about to train on and every version it
published, in the folder $CHAOS_EVIDENCE."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgpack

from dvp_rl.contract.group import Group
from dvp_rl.logs import configure
from dvp_rl.settings import user_errors
from dvp_trainer.__main__ import _stoppable
from dvp_trainer.config import TrainSettings
from dvp_trainer.data.batch import Batch
from dvp_trainer.loop import train
from dvp_trainer.setup import open_run

VARIABLE = "CHAOS_EVIDENCE"


class Trained(NamedTuple):
    """A batch about to be trained on."""

    incarnation: str
    """Id of the trainer process; ids sort by start time."""
    step: int
    groups: tuple[Group, ...]


class Evidence:
    """Records of all trainers of a run, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.weights = folder / "weights"
        self.weights.mkdir(parents=True, exist_ok=True)

    def keep_weights(self, root: Path) -> None:
        """Copies every published version, because retention may remove the originals."""
        with suppress(PermissionError):  # nothing can be published meanwhile, so it will still be there
            for folder in root.glob("weights-*"):
                self._keep(folder)

    def _keep(self, folder: Path) -> None:
        kept = self.weights / f"{folder.name}.safetensors"
        if not kept.exists():
            partial = self.folder / f"{folder.name}.{os.getpid()}"
            with suppress(FileNotFoundError):
                shutil.copyfile(folder / "model.safetensors", partial)
                partial.rename(kept)

    def write(self, incarnation: str, step: int, batch: Batch) -> None:
        record = msgpack.packb((step, [scored.group.to_bytes() for scored in batch.groups]))
        with (self.folder / f"{incarnation}.trained").open("ab") as file:
            file.write(record)

    def trained(self) -> Iterator[Trained]:
        """All batches, ordered by incarnation and then by training."""
        for path in sorted(self.folder.glob("*.trained")):
            with path.open("rb") as file:
                # A record that a kill cut short was not trained on.
                for step, groups in msgpack.Unpacker(file):
                    yield Trained(path.stem, step, tuple(Group.from_bytes(data) for data in groups))


async def _train(settings: TrainSettings) -> None:
    evidence, incarnation = Evidence(Path(os.environ[VARIABLE])), f"{time.time_ns()}-{os.getpid()}"
    root = settings.weights_folder.resolve() / settings.run_id
    evidence.keep_weights(root)
    async with open_run(settings) as run:
        step = run.learner.step

        def recorded(batch: Batch) -> dict[str, float]:
            evidence.keep_weights(root)
            evidence.write(incarnation, run.step + 1, batch)
            return step(batch)

        run.learner.step = recorded  # type: ignore[method-assign]
        await train(run)
        evidence.keep_weights(root)


def main() -> None:
    with user_errors("dvp-train"):
        settings = TrainSettings.load(sys.argv[1:])
        configure(settings.log_format, settings.log_level).run = settings.run_id
        asyncio.run(_stoppable(_train(settings)))
