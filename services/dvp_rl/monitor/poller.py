"""Polls the broker, once for all viewers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from pydantic import BaseModel

from dvp_rl.contract.errors import DvpError, UnavailableError
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.dead_letters import DeadLetters
from dvp_rl.transport.health import Snapshot, report, take_snapshot
from dvp_rl.transport.roles import Role

from .bodies import LetterPage, Picture
from .completions import CompletionsFile
from .curves import MetricsFile
from .feed import Feed
from .rates import Rates
from .settings import MonitorSettings

logger = logging.getLogger(__name__)

NUM_LETTERS = 10
"""Dead letters on the newest page."""


class Poller:
    """Runs two read-only scripts per poll. Everything else reads `picture`, or follows `feed`."""

    def __init__(self, settings: MonitorSettings) -> None:
        self.feed = Feed(settings.max_viewers)
        self.snapshot: Snapshot | None = None
        """None while the broker does not answer."""
        self.picture = Picture(at=time.time(), run_id=settings.run_id, error="not connected to the broker yet")
        self._settings = settings
        self._broker: Broker | None = None
        self._rates = Rates()
        self._metrics = None if settings.metrics_file is None else MetricsFile(settings.metrics_file)
        self.completions = None if settings.completions_file is None else CompletionsFile(settings.completions_file)
        self._look_now = asyncio.Event()

    @property
    def broker(self) -> Broker:
        """Raises UnavailableError before the first connection."""
        if self._broker is None:
            raise UnavailableError(self.picture.error)
        return self._broker

    def look_now(self) -> None:
        self._look_now.set()

    async def run(self) -> None:
        """Polls until cancelled. Files are read beside the broker: a long one delays no picture."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._poll())
            if self._metrics is not None:
                tasks.create_task(self._follow("curves", self._metrics.look))
            if self.completions is not None:
                tasks.create_task(self._follow("completions", self.completions.look))

    async def _follow(self, kind: str, look: Callable[[], BaseModel | None]) -> None:
        while True:
            news = await asyncio.to_thread(look)
            if news is not None:
                self.feed.publish(kind, news.model_dump_json())
            await asyncio.sleep(self._settings.interval_s)

    async def _poll(self) -> None:
        try:
            while True:
                await self._look()
                self._look_now.clear()
                try:
                    async with asyncio.timeout(self._settings.interval_s):
                        await self._look_now.wait()
                except TimeoutError:
                    pass
        finally:
            if self._broker is not None:
                await self._broker.close()

    async def _look(self) -> None:
        try:
            picture = await self._ask()
        except DvpError as error:
            if not self.picture.error or self.snapshot is not None:
                logger.warning("%s; trying again", error)
            self.snapshot = None
            picture = self.picture.model_copy(update={"at": time.time(), "error": str(error)})
        self.picture = picture
        self.feed.publish("picture", picture.model_dump_json())

    async def _ask(self) -> Picture:
        settings = self._settings
        if self._broker is None:
            self._broker = await Broker.connect(settings.redis_url, settings.run_id, role=Role.MONITOR, create=False)
        seen = await take_snapshot(self._broker)
        letters = await DeadLetters(self._broker).page(NUM_LETTERS)
        self.snapshot = seen
        return Picture(
            at=time.time(),
            run_id=settings.run_id,
            error="",
            health=report(settings.run_id, seen),
            rates=self._rates.update(time.monotonic(), {k: v for k, v in seen.counters.items() if k != "committed_at"}),
            newest_version=seen.newest_version,
            min_seq=seen.min_seq,
            trainer_waiting_s=seen.trainer_waiting_s,
            used_memory=seen.used_memory,
            maxmemory=seen.maxmemory,
            letters=LetterPage.of(letters, NUM_LETTERS),
        )
