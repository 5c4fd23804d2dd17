"""The weight swap: loads announced versions into the engine, from a verified folder or from the trainer itself."""

from __future__ import annotations

import asyncio
import logging
import math
import time

from dvp_rl.contract.errors import DvpError, WeightError
from dvp_rl.contract.group import Group
from dvp_rl.contract.http import WeightStatus
from dvp_rl.contract.weights import Announcement, WeightRoute, WeightVersion
from dvp_rl.engines.protocol import Engine, Receiving, recovered
from dvp_rl.logs import LogContext
from dvp_rl.transport.failpoints import failpoint
from dvp_rl.transport.replicas import ReplicaRegistry
from dvp_rl.weights.folder import read_canary
from dvp_rl.weights.registry import WeightRegistry
from dvp_rl.weights.transfers import Transfers

from .canary import Guard
from .metrics import Metrics
from .weight_folders import WeightFolders

logger = logging.getLogger(__name__)

BLOCK_MS = 5_000
MIN_PATIENCE_MS = 500
MAX_PATIENCE_MS = 30_000
LOOK_S = 1.0
"""Interval between two looks whether an examination is due, in seconds."""
OFFER_S = 60.0
"""Longest wait for the trainer to offer a version, in seconds; the trainer reads all of it first."""


class WeightSwap:
    """Serves the newest version that can be loaded. A version that cannot be loaded leaves the old weights in place."""

    def __init__(
        self, engine: Engine, folders: WeightFolders, metrics: Metrics, context: LogContext, guard: Guard
    ) -> None:
        self._engine = engine
        self._guard = guard
        self._folders = folders
        self._metrics = metrics
        self._context = context
        self._lock = asyncio.Lock()
        self._changed = asyncio.Event()
        self._patience_ms = MIN_PATIENCE_MS
        self._newest: Announcement | None = None
        self._loading: str | None = None
        self._error: str | None = None
        self._spent_s, self._since = 0.0, math.inf
        self._served()

    @property
    def seq(self) -> int:
        return WeightVersion.parse(self._engine.version).seq

    @property
    def status(self) -> WeightStatus:
        error, wrong = self._error or self._guard.failure or None, self._guard.wrong or None
        return WeightStatus(version=self._engine.version, loading=self._loading, error=error, wrong=wrong)

    @property
    def quarantined(self) -> bool:
        """True while the weights served are too old to take jobs, or are known not to be what they are called."""
        return bool(self._guard.wrong) or (self._newest is not None and self.seq < self._newest.min_seq)

    @property
    def failure(self) -> str:
        """Why the weights served may not work: they did not pass their canary; "" if they did."""
        return self._guard.failure

    @property
    def num_wrong(self) -> int:
        """How often the weights served did not pass their canary."""
        return self._guard.num_wrong

    @property
    def spent_s(self) -> float:
        """Seconds of all swaps so far, the one in progress included."""
        return self._spent_s + max(0.0, time.monotonic() - self._since)

    async def wait_allowed(self) -> None:
        while self.quarantined or self._guard.unproven:
            await self.change()

    async def vouch(self, group: Group, num_wrong: int) -> Group:
        """The group, once all weights that drew it have passed their canary; the caller bounds the wait. Raises
        WeightError if that fails or has failed since it had `num_wrong` times."""
        versions = {span.version for sample in group.samples for span in sample.versions}
        while self.num_wrong == num_wrong and not self._guard.wrong and self._guard.is_open(versions):
            await self.change()
        if self.num_wrong != num_wrong or self._guard.wrong:
            raise WeightError(self._guard.wrong or "meanwhile the engine served other weights than it said")
        return group

    async def reach(self, seq: int) -> None:
        """Returns when `follow` has loaded weights of at least `seq` that may draw. The caller bounds the wait.

        Raises WeightError if the newest version cannot be loaded or does not pass its canary; `follow` keeps trying.
        """
        while self.seq < seq or self._guard.unproven:
            if self._guard.failure:
                raise WeightError(self._guard.failure)
            if self.seq < seq and self._error is not None and self._newest is not None and self._newest.seq >= seq:
                raise WeightError(self._error)
            await self.change()
        await self.wait_allowed()

    async def refresh(self, registry: WeightRegistry) -> WeightStatus:
        """Loads the newest version now. Raises WeightError, UnavailableError."""
        newest = await registry.latest()
        if newest is not None:
            await self._swap(newest, registry)
        return self.status

    async def follow(self, registry: WeightRegistry) -> None:
        """One round: waits for a newer version and for the engine to be up, and loads it. A version that failed is
        retried with backoff; a newer announcement replaces it at once."""
        if self._newest is None or not (self._error or self._guard.wrong):
            newest = await registry.wait_newer(self.seq, BLOCK_MS)
        else:
            newest = await registry.wait_newer(self._newest.seq, self._patience_ms) or self._newest
        if newest is None:
            return
        self._notice(newest)
        await recovered(self._engine)
        try:
            await self._swap(newest, registry)
            self._patience_ms = MIN_PATIENCE_MS
        except WeightError:
            self._patience_ms = min(2 * self._patience_ms, MAX_PATIENCE_MS)

    async def examine(self) -> None:
        """One round: waits a moment, and examines what is served if that is due, with or without a broker. Raises
        WeightError if it does not pass; `follow` loads anew what is wrong."""
        await asyncio.sleep(LOOK_S)
        await recovered(self._engine)
        while self._guard.wrong:
            await self.change()
        async with self._lock:
            if self._guard.due:
                try:
                    await self._guard.examine()
                finally:
                    self._changed.set()

    def _notice(self, announcement: Announcement) -> None:
        if self._newest is None or announcement.seq >= self._newest.seq:
            self._newest = announcement

    async def _swap(self, announcement: Announcement, registry: WeightRegistry) -> None:
        async with self._lock:
            self._notice(announcement)
            if announcement.seq <= self.seq and not self._guard.wrong:
                self._error = None
                return
            self._loading = announcement.version
            self._since = time.monotonic()
            self._changed.set()
            try:
                await self._load(announcement, registry)
                self._error = None
            except WeightError as error:
                self._error = f"{announcement.version}: {error}"
                self._metrics.swaps.labels("failed").inc()
                loaded = self._engine.version == announcement.version
                what = "take no work" if loaded else "not loaded, still serving the old ones"
                logger.error("weights %s %s: %s", announcement.version, what, error)
                raise
            finally:
                self._loading = None
                self._spent_s, self._since = self.spent_s, math.inf
                self._served()

    async def _load(self, announcement: Announcement, registry: WeightRegistry) -> None:
        with self._metrics.swap_seconds.time():
            if announcement.route is WeightRoute.FOLDER:
                await self._read(announcement, registry)
            else:
                await self._receive_or_read(announcement, registry)
            await self._guard.examine()
        failpoint("swap.after")
        self._metrics.swaps.labels("loaded").inc()
        logger.info("serving %s, changed by %d batches", announcement.version, announcement.step)

    async def _receive_or_read(self, announcement: Announcement, registry: WeightRegistry) -> None:
        try:
            return await self._receive(announcement, Transfers(registry.broker))
        except DvpError as error:
            reason = error
        logger.warning("%s; reading its folder instead", reason)
        try:
            await self._read(announcement, registry)
        except WeightError as error:
            raise WeightError(f"transfer failed: {reason}; reading the folder failed: {error}") from None

    async def _receive(self, announcement: Announcement, transfers: Transfers) -> None:
        if not isinstance(self._engine, Receiving):
            raise WeightError(f"engine {self._engine.facts.name} can only read folders, not receive transfers")
        request = self._engine.transfer_request(announcement.version)
        offer = await transfers.ask(request, OFFER_S)
        if offer.version != announcement.version:
            raise WeightError(f"expected an offer of {announcement.version}, the trainer offered {offer.version}")
        failpoint("swap.before")
        with self._guard.expecting(announcement.version, offer.canary):
            await self._engine.receive(offer)

    async def _read(self, announcement: Announcement, registry: WeightRegistry) -> None:
        try:
            folder = await self._folders.find(announcement, ReplicaRegistry(registry.broker).seqs_in_use)
            canary = await asyncio.to_thread(read_canary, folder)
            failpoint("swap.before")
            with self._guard.expecting(announcement.version, canary):
                await self._engine.load(folder, announcement.version)
        except OSError as error:  # any error of a volume: the old weights stay in service, and the load is retried
            raise WeightError(f"{announcement.folder}: {error.strerror or error}") from error

    def _served(self) -> None:
        self._context.version = self._engine.version
        self._metrics.version_seq.set(self.seq)
        self._changed.set()

    async def change(self) -> None:
        """Returns at the next change of what is served or being loaded."""
        self._changed.clear()
        await self._changed.wait()
