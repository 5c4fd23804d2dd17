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
from .feed import Feed, Viewers
from .rates import Rates
from .settings import MonitorSettings

logger = logging.getLogger(__name__)

NUM_LETTERS = 10
"""Dead letters on the newest page."""


class Poller:
    """Watches one run. It runs two read-only scripts per poll; everything else reads `picture`, or follows `feed`."""

    def __init__(self, settings: MonitorSettings, run_id: str, viewers: Viewers, broker: Broker | None = None) -> None:
        """`broker` of the run, if there is a connection already."""
        self.run_id = run_id
        self.feed = Feed(viewers)
        self.used_at = time.monotonic()
        """When somebody last asked for this run, or watched it."""
        self.snapshot: Snapshot | None = None
        """None while the broker does not answer."""
        self.picture = Picture(at=time.time(), run_id=run_id, error="not connected to the broker yet")
        self._settings, self._broker = settings, broker
        self._rates = Rates()
        metrics, completions = settings.files(run_id)
        self._metrics = None if metrics is None else MetricsFile(metrics)
        self.completions = None if completions is None else CompletionsFile(completions)
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
        """Polls until its feed is closed. Files are read beside the broker: a long one delays no picture."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._poll())
            if self._metrics is not None:
                tasks.create_task(self._follow("curves", self._metrics.look))
            if self.completions is not None:
                tasks.create_task(self._follow("completions", self.completions.look))

    async def _follow(self, kind: str, look: Callable[[], BaseModel | None]) -> None:
        while not self.feed.closed:
            news = await asyncio.to_thread(look)
            if news is not None:
                self.feed.publish(kind, news.model_dump_json())
            await asyncio.sleep(self._settings.interval_s)

    async def _poll(self) -> None:
        while not self.feed.closed:
            await self.look()
            self._look_now.clear()
            try:
                async with asyncio.timeout(self._settings.interval_s):
                    await self._look_now.wait()
            except TimeoutError:
                pass

    async def look(self) -> None:
        """Asks the broker once."""
        try:
            picture = await self._ask()
        except DvpError as error:
            # The log is about the monitor's own run.
            news = not self.picture.error or self.snapshot is not None
            if news and self.run_id == self._settings.run_id:
                logger.warning("%s; trying again", error)
            self.snapshot = None
            picture = self.picture.model_copy(update={"at": time.time(), "error": str(error)})
        self.picture = picture
        self.feed.publish("picture", picture.model_dump_json())

    async def close(self) -> None:
        """Closes the connection."""
        if self._broker is not None:
            await self._broker.close()

    async def _ask(self) -> Picture:
        if self._broker is None:
            url = self._settings.redis_url
            self._broker = await Broker.connect(url, self.run_id, role=Role.MONITOR, create=False)
        seen = await take_snapshot(self._broker)
        letters = await DeadLetters(self._broker).page(NUM_LETTERS)
        self.snapshot = seen
        return Picture(
            at=time.time(),
            run_id=self.run_id,
            error="",
            health=report(self.run_id, seen),
            rates=self._rates.update(time.monotonic(), seen.counters),
            newest_version=seen.newest_version,
            min_seq=seen.min_seq,
            trainer_waiting_s=seen.trainer_waiting_s,
            used_memory=seen.used_memory,
            maxmemory=seen.maxmemory,
            letters=LetterPage.of(letters, NUM_LETTERS),
        )
