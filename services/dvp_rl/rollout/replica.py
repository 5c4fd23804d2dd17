"""One engine with a name: generates groups and counts them in metrics."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from dvp_rl.contract.errors import EngineError, NotFoundError
from dvp_rl.contract.group import Group, Sample
from dvp_rl.contract.job import Job, Sink
from dvp_rl.contract.openai import Model
from dvp_rl.engines.protocol import Caching, Engine, Recovering, recovered
from dvp_rl.engines.seeds import alone

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
        self._started_at = int(time.time())
        metrics.in_flight.set_function(lambda: slots.in_flight)
        if isinstance(engine, Caching):
            metrics.watch(engine)

    @property
    def outage(self) -> str:
        """Why the engine cannot generate now; "" while it can."""
        return self.engine.outage if isinstance(self.engine, Recovering) else ""

    def model(self, name: str | None = None) -> Model:
        """What clients of OpenAI and vLLM call a model: the run. Raises NotFoundError if `name` is another one's."""
        if name not in (None, self.run_id):
            raise NotFoundError(f"model {name!r}: this replica has only {self.run_id!r}, the run's id")
        return Model(id=self.run_id, created=self._started_at, max_model_len=self.engine.context_length)

    async def recovered(self) -> None:
        """Returns when there is no outage."""
        await recovered(self.engine)

    async def generate(self, job: Job, timeout_s: float) -> Group:
        """The finished group. Raises RequestError, UnavailableError, EngineError (also if the engine takes longer than
        `timeout_s`)."""
        start = time.monotonic()
        samples = await (self._in_turn if job.sink is Sink.CLIENT else self._ask)(job, timeout_s)
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

    async def _in_turn(self, job: Job, timeout_s: float) -> tuple[Sample, ...]:
        """Generates as many samples at a time as clients may: all in one call, or each in its own. The time in line is
        not limited."""
        asked: list[asyncio.Task[tuple[Sample, ...]]] = []
        begun = 0
        try:
            async with asyncio.TaskGroup() as group:
                while begun < job.n:
                    granted = await self.slots.clients.turn(job.n - begun)
                    indices = range(begun, begun + granted)
                    for part in [job] if granted == job.n else [alone(job, index) for index in indices]:
                        task = group.create_task(self._ask(part, timeout_s))
                        # Not in the task itself: a task that is cancelled early never runs.
                        task.add_done_callback(partial(self._ended, part.n))
                        asked.append(task)
                    begun += granted
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return tuple(sample for task in asked for sample in task.result())

    def _ended(self, n: int, _: object) -> None:
        self.slots.clients.ended(n)

    async def _ask(self, job: Job, timeout_s: float) -> tuple[Sample, ...]:
        try:
            async with asyncio.timeout(timeout_s):
                return await self.engine.generate(job)
        except TimeoutError:
            raise EngineError(f"generation took longer than {timeout_s:.0f} s") from None
