"""One engine with a name: generates groups, and counts what it does."""

from __future__ import annotations

import asyncio
import time

from services.contract.errors import EngineError
from services.contract.group import Group
from services.contract.job import Job
from services.engines.protocol import Engine, Recovering

from .admission import Slots
from .metrics import Metrics
from .prompts import Prompts


class Replica:
    def __init__(
        self, replica_id: str, run_id: str, engine: Engine, prompts: Prompts, slots: Slots, metrics: Metrics
    ) -> None:
        self.id = replica_id
        self.run_id = run_id
        self.engine = engine
        self.prompts = prompts
        self.slots = slots
        self.metrics = metrics
        metrics.in_flight.set_function(lambda: slots.in_use)

    @property
    def outage(self) -> str:
        """Why the engine cannot generate now; "" while it can."""
        return self.engine.outage if isinstance(self.engine, Recovering) else ""

    async def recovered(self) -> None:
        """Returns when there is no outage."""
        if isinstance(self.engine, Recovering):
            await self.engine.recovered()

    async def generate(self, job: Job, timeout_s: float) -> Group:
        """The finished group. Raises RequestError, EngineError (also when it takes longer than `timeout_s`)."""
        start = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                samples = await self.engine.generate(job)
        except TimeoutError:
            raise EngineError(f"generation took longer than {timeout_s:.0f} s") from None
        group = Group(
            **{name: getattr(job, name) for name in ("job_id", "run_id", "prompt_ids", "sampling", "sink", "metadata")},
            samples=samples,
            replica_id=self.id,
            engine=self.engine.facts,
            generate_s=time.monotonic() - start,
            finished_at=time.time(),
        )
        self.metrics.observe(group)
        return group
