"""The training loop. One iteration is one batch:

groups      <- prompts sampled by the replicas from pi_infer_mp, worth what the reward function says
advantages  <- A_i = R_i - mean of the others (RLOO)
l           <- log pi_train_mp - log pi_infer_mp, recomputed here
w           <- token veto, then masked importance sampling
gradient    <- 1/D sum w A grad log pi_train_mp, one AdamW step
weights     -> every replica
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from dvp_rl import tracing
from dvp_rl.transport.replicas import BEAT_S, ReplicaRegistry, TrainerBeat
from dvp_rl.transport.retention import sweep_broker

from .config import TrainSettings
from .data.batch import Batch
from .learn.step import Learner
from .publish.publisher import Publisher
from .publish.sender import Sender
from .queue.evaluator import Evaluator
from .queue.feeder import Feeder
from .report.sinks import Reporter
from .report.token_log import write_tokens
from .resume.checkpoint import Checkpoints, Progress

logger = logging.getLogger(__name__)


async def train(run: Run) -> None:
    """Trains until `steps` batches are done. A crash at any point costs at most the work since the last checkpoint."""
    while run.step < run.settings.steps:
        with run.watch.measure("wait"):
            batch = await run.next_batch()
        with run.watch.measure("train"), tracing.span("train", batch.metadata):
            metrics = await asyncio.to_thread(run.learner.step, batch)
        run.count(batch, metrics)
        if run.is_due(run.settings.report.tokens_interval) and run.learner.evidence is not None:
            write_tokens(run.learner.evidence, run.settings.out_dir, run.step)
        if metrics["optimizer/updates"]:
            with run.watch.measure("publish"), tracing.span("publish", batch.metadata):
                await run.publisher.publish(run.updates)
        await run.feeder.settle(batch)
        if run.is_due(run.settings.evaluate.interval):
            metrics |= await run.evaluate()
        run.reporter.log(run.step, metrics | run.feeder.metrics() | run.watch.lap(batch, run.settings.reward.workers))
        # After the log: what a checkpoint covers is not logged again.
        if run.is_due(run.settings.checkpoint.interval) or run.is_best:
            await run.save()
    run.finished = True
    await run.tell()


class Stopwatch:
    """Where the time of an iteration went."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._parts: dict[str, float] = {}
        self._generated: dict[str, Coverage] = {}
        self._swaps_s: dict[str, float] = {}
        self._swaps_told = self._started
        self._swapping: float | None = None
        """Share of the time that replicas spent on swaps between the last two tellings."""

    def tell_swaps(self, swaps_s: dict[str, float]) -> None:
        """Seconds of swaps so far, by replica."""
        now = time.monotonic()
        elapsed, self._swaps_told = now - self._swaps_told, now
        before, self._swaps_s = self._swaps_s, swaps_s
        # One that is new, or has started anew, is counted from the next time on.
        spent = [swaps_s[name] - before[name] for name in swaps_s.keys() & before.keys()]
        spent = [seconds for seconds in spent if seconds >= 0]
        self._swapping = fmean(spent) / elapsed if spent else None

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self._parts[f"time/{part}_s"] = time.monotonic() - start

    def lap(self, batch: Batch, reward_workers: int) -> dict[str, float]:
        """The parts since the last lap, the rates, and who stood still for what share of the time."""
        now = time.monotonic()
        elapsed, self._started = now - self._started, now
        parts, self._parts = self._parts, {}
        busy = {
            "generate": self._generating(batch),
            "reward": sum(scored.reward_s for scored in batch.groups) / reward_workers,
            "train": parts["time/train_s"],
            "publish": parts.get("time/publish_s", 0.0),
        }
        shares = {side: seconds / elapsed for side, seconds in busy.items()}
        if self._swapping is not None:
            shares["swap"] = self._swapping
        idle = {f"idle/{side}": min(max(1 - share, 0.0), 1.0) for side, share in shares.items()}
        return (
            parts
            | idle
            | {
                "time/step_s": elapsed,
                "throughput/samples_per_second": batch.num_sequences / elapsed,
                "throughput/tokens_per_second": batch.num_tokens / elapsed,
            }
        )

    def _generating(self, batch: Batch) -> float:
        """Seconds in which a replica, on average, drew samples of the batch."""
        busy: defaultdict[str, float] = defaultdict(float)
        for scored in sorted(batch.groups, key=lambda scored: scored.arrived):
            covered = self._generated.setdefault(scored.group.replica_id, Coverage())
            busy[scored.group.replica_id] += covered.add(scored.arrived - scored.group.generate_s, scored.arrived)
        return sum(busy.values()) / len(busy)


class Coverage:
    """How much of a line intervals cover that come in the order of their ends."""

    def __init__(self) -> None:
        self._end = -math.inf

    def add(self, start: float, end: float) -> float:
        """The length that it adds: what lies before the end of another counts once."""
        start, self._end = max(start, self._end), max(end, self._end)
        return max(end - start, 0.0)


@dataclass
class Run:
    """A training run in progress; built by setup.open_run."""

    settings: TrainSettings
    learner: Learner
    feeder: Feeder
    publisher: Publisher
    sender: Sender | None
    evaluator: Evaluator | None
    checkpoints: Checkpoints
    replicas: ReplicaRegistry
    resumed_from: Progress
    reporter: Reporter = field(default_factory=lambda: Reporter([]))
    step: int = 0
    """Batches trained."""
    updates: int = 0
    """Batches that changed the weights; staleness is counted in these."""
    samples: int = 0
    best: tuple[int, float] | None = None
    """(step, held-out score)."""
    watch: Stopwatch = field(default_factory=Stopwatch)
    finished: bool = False
    """Nothing is left to do; nobody need miss this trainer when it is gone."""

    def count(self, batch: Batch, metrics: dict[str, float]) -> None:
        self.step += 1
        self.updates += metrics["optimizer/updates"] > 0
        self.samples += batch.num_sequences

    def is_due(self, interval: int) -> bool:
        """Every `interval` batches and after the last one; never if 0."""
        return interval > 0 and (self.step % interval == 0 or self.step == self.settings.steps)

    @property
    def is_best(self) -> bool:
        return self.best is not None and self.best[0] == self.step

    async def evaluate(self) -> dict[str, float]:
        """Held-out scores of the weights announced last."""
        assert self.evaluator is not None, "evaluate.interval without data.heldout is refused by the settings"
        with self.watch.measure("eval"):
            score = await self.evaluator.evaluate()
        if self.best is None or score.avg > self.best[1]:
            self.best = (self.step, score.avg)
        return {"heldout/score": score.avg, **score.metrics()}

    async def next_batch(self) -> Batch:
        """The feeder's. Waiting for it, a broker too full to take its prompts gets a checkpoint, and room from it."""
        waiting = asyncio.ensure_future(self.feeder.next_batch())
        try:
            while not waiting.done():
                full = asyncio.ensure_future(self.feeder.full_of_the_past())
                await asyncio.wait((waiting, full), return_when=asyncio.FIRST_COMPLETED)
                full.cancel()
                if not waiting.done():
                    logger.info("checkpoint before its time: the broker is too full for the next prompts")
                    await self.save()
            return waiting.result()
        finally:
            waiting.cancel()

    async def save(self) -> None:
        """A checkpoint, and only then the acknowledgement of what it covers."""
        progress = Progress(
            step=self.step,
            updates=self.updates,
            samples=self.samples,
            seq=self.publisher.announced.seq,
            best=self.best,
            **self.feeder.cover(),
        )
        await asyncio.to_thread(self.checkpoints.save, progress, self.learner.save)
        await self.feeder.acknowledge()
        await self.publisher.pin(self.checkpoints.seqs())
        await sweep_broker(self.replicas.broker)

    def sending(self) -> Iterator[Coroutine[Any, Any, None]]:
        """What sends weights while the run trains, if anything does."""
        if self.sender is not None:
            yield self.sender.run()

    async def beat(self) -> None:
        """Tells the broker how far the run is, for ever."""
        while True:
            await self.tell()
            await asyncio.sleep(BEAT_S)

    async def tell(self) -> None:
        version, waiting_s = self.publisher.announced.version, self.feeder.waiting_s()
        beat = TrainerBeat(self.step, version, waiting_s, int(self.finished))
        await self.replicas.beat_trainer(beat, fence=self.feeder.fence)
        self.watch.tell_swaps(await self.replicas.swaps_s())
