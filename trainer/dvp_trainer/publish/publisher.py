"""Publishes weights: a complete HF folder per version, renamed into place and only then announced."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from dvp_rl.contract.errors import WeightError
from dvp_rl.contract.group import Group
from dvp_rl.contract.weights import INITIAL_SEQ, Announcement, Manifest, WeightVersion
from dvp_rl.transport.replicas import ReplicaRegistry
from dvp_rl.weights.download import await_published
from dvp_rl.weights.folder import copy_companions, folder_name, newest_seq, publish_folder, sweep, write_manifest
from dvp_rl.weights.registry import WeightRegistry
from dvp_trainer.config import TrainSettings
from dvp_trainer.disk import unwritable, writing

logger = logging.getLogger(__name__)

KNOWN_VERSIONS = 4096
"""Number of versions to remember; samples of older ones are far too stale under any setting."""


class Publisher:
    """Writes, announces and sweeps the versions of one run."""

    announced: Announcement

    def __init__(
        self,
        write_weights: Callable[[Path], None],
        registry: WeightRegistry,
        replicas: ReplicaRegistry,
        settings: TrainSettings,
        fence: int,
        chat_template: str | None = None,
    ) -> None:
        """`chat_template`: text of the template to publish in place of the model's."""
        self._write_weights, self._registry, self._replicas, self._fence = write_weights, registry, replicas, fence
        self.chat_template = chat_template
        self._run_id, self._model_folder = settings.run_id, settings.model.path
        self._root = settings.weights_folder.resolve() / settings.run_id
        with writing(f"weights.folder: {self._root}", self._root):
            self._root.mkdir(parents=True, exist_ok=True)
        self._url, self._token = settings.weights.url, settings.weights.read_token
        self._patience_s = settings.broker.stall_timeout_s
        self._keep_last, self._max_staleness = settings.weights.keep_last, settings.batch.max_staleness
        self._route = settings.weights.route
        self._step_of: dict[int, int] = {INITIAL_SEQ: 0}
        self._own: list[Announcement] = []

    async def publish(self, step: int, *, after: int = 0) -> None:
        """Publishes and announces the model's weights, which `step` batches have changed.

        `after`: the seq in the checkpoint, in case the broker has forgotten it.
        Raises WeightError naming the folder (disk full, not writable) or the URL that does not serve the version; then
        nothing was announced and replicas keep the old weights. Raises LeaseLostError if another trainer took over.
        """
        if not self._own:
            # Samples of versions of earlier incarnations may still arrive.
            self._step_of |= {seq: old.step for seq, old in (await self._registry.history()).items()}
        # A wiped broker has forgotten versions whose folders still exist and that replicas may still serve.
        used = max(after, newest_seq(self._root), *self._step_of)
        seq = await self._registry.next_seq(fence=self._fence, at_least=used)
        folder = self._root / folder_name(seq)
        manifest = await asyncio.to_thread(self._write, folder, seq, step)
        url = self._url and f"{self._url}/v1/weights/{self._run_id}/{folder.name}"
        if url is not None:
            await await_published(url, manifest.version, self._token, self._patience_s)
        fresh = [old.seq for old in self._own if old.step >= step - self._max_staleness]
        self.announced = Announcement(
            version=str(manifest.version),
            step=step,
            folder=str(folder),
            url=url,
            min_seq=min(fresh, default=seq),
            announced_at=time.time(),
            route=self._route,
        )
        await self._registry.announce(self.announced, fence=self._fence)
        self._own = [old for old in self._own if old.seq in fresh] + [self.announced]
        self._step_of[seq] = step
        for forgotten in sorted(self._step_of)[:-KNOWN_VERSIONS]:
            del self._step_of[forgotten]
        await self._sweep()

    def oldest_within(self, staleness: int) -> int:
        """Seq of the oldest version announced by this trainer that at most `staleness` batches have changed since."""
        return min(old.seq for old in self._own if old.step >= self.announced.step - staleness)

    async def announce_again(self) -> bool:
        """Publishes again if the broker has forgotten the last announcement; True if it had."""
        latest = await self._registry.latest()
        if latest is not None and latest.seq >= self.announced.seq:
            return False
        await self.publish(self.announced.step)
        return True

    async def pin(self, seqs: Iterable[int]) -> None:
        """Keeps the folders of these versions, which belong to checkpoints."""
        await self._registry.pin(seqs, fence=self._fence)

    def staleness(self, group: Group) -> int:
        """Number of batches that changed the weights between the group's oldest span and the last announcement.

        Versions of a timeline that ended in a crash may be ahead of a resumed trainer, so the distance counts.
        """
        versions = {span.version for sample in group.samples for span in sample.versions}
        seqs = {WeightVersion.parse(version).seq for version in versions}
        unknown = seqs - self._step_of.keys()
        if unknown:
            logger.warning("group %s was drawn from unknown weight versions %s", group.job_id, sorted(unknown))
            return self.announced.step + 1
        return max(abs(self.announced.step - self._step_of[seq]) for seq in seqs)

    def _write(self, final: Path, seq: int, step: int) -> Manifest:
        partial = final.with_name(f".{final.name}.partial")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            copy_companions(self._model_folder, partial, self.chat_template)
            self._write_weights(partial)
            manifest = write_manifest(partial, self._run_id, seq, step)
            publish_folder(partial, final)
        except (OSError, WeightError) as error:
            raise WeightError(unwritable(f"weights.folder: version {seq}", self._root, error)) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return manifest

    async def _sweep(self) -> None:
        in_use = await self._replicas.seqs_in_use() | await self._registry.pinned() | {self.announced.seq}
        await asyncio.to_thread(sweep, self._root, keep=in_use, last=self._keep_last, newest=self.announced.seq)
