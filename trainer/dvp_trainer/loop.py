"""The training loop. One iteration is one batch:

groups      <- prompts sampled by the replicas from pi_infer_mp and scored by the reward function
advantages  <- A_i = R_i - mean of the others (RLOO)
l           <- log pi_train_mp - log pi_infer_mp, recomputed here
w           <- token veto, then masked importance sampling
gradient    <- 1/D sum w A grad log pi_train_mp; an AdamW step on it (batch.updates of them on parts of the batch)
weights     -> every replica
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

from dvp_rl import tracing
from dvp_rl.contract.completions import Completion
from dvp_rl.contract.job import job_position
from dvp_rl.transport.replicas import BEAT_S, ReplicaRegistry, TrainerBeat
from dvp_rl.transport.retention import sweep_broker

from .config import TrainSettings
from .data.batch import Batch
from .learn.step import Learner
from .patience import patient
from .publish.publisher import Publisher
from .publish.sender import Sender
from .queue.evaluator import Evaluator
from .queue.feeder import Feeder
from .report.pick import pick_completions
from .report.sinks import Reporter
from .report.stopwatch import Stopwatch
from .report.token_log import write_tokens
from .resume.checkpoint import Checkpoints, Progress

logger = logging.getLogger(__name__)

IDLE_BATCHES = 3
"""Batches in a row without an update that are worth a warning."""


async def train(run: Run) -> None:
    """Trains until `steps` batches are done. A crash at any point costs at most the work since the last checkpoint."""
    while run.step < run.settings.steps:
        with run.watch.measure("wait", run.feeder.progress):
            batch = await run.next_batch()
        with run.watch.measure("train", "training on the batch"), tracing.span("train", batch.metadata):
            metrics = await asyncio.to_thread(run.learner.step, batch)
        run.count(batch, metrics)
        if run.is_due(run.settings.report.tokens_interval) and run.learner.evidence is not None:
            write_tokens(run.learner.evidence, run.settings.out_dir, run.step)
        if run.shows_completions():
            run.reporter.log_completions(run.step, run.completions(batch, updated=metrics["optimizer/updates"] > 0))
        if metrics["optimizer/updates"]:
            with run.watch.measure("publish", "publishing the weights"), tracing.span("publish", batch.metadata):
                await run.publisher.publish(run.weight_steps)
        await run.feeder.close_batch(batch)
        if run.is_due(run.settings.evaluate.interval):
            metrics |= await run.evaluate()
        run.reporter.log(run.step, metrics | run.feeder.metrics() | run.watch.lap(batch, run.settings.reward.workers))
        # After the log: a resumed run does not log again what a checkpoint covers.
        if run.is_due(run.settings.checkpoint.interval) or run.is_best:
            await run.save()
    run.finished = True
    await run.tell()


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
    weight_steps: int = 0
    """Batches that changed the weights; staleness is counted in these."""
    samples: int = 0
    best: tuple[int, float] | None = None
    """(step, held-out score)."""
    watch: Stopwatch = field(default_factory=Stopwatch)
    idle: int = 0
    """Batches in a row that changed nothing."""
    wrong: dict[str, str] = field(default_factory=dict)
    """What is wrong with replicas, by id: see `ReplicaBeat.wrong`."""
    finished: bool = False
    """True once nothing is left to do; the absence of this trainer is then not a fault."""

    def count(self, batch: Batch, metrics: dict[str, float]) -> None:
        self.step += 1
        self.weight_steps += metrics["optimizer/updates"] > 0
        self.samples += batch.num_episodes
        self.idle = 0 if metrics["optimizer/updates"] else self.idle + 1
        if self.idle == IDLE_BATCHES:
            logger.warning(
                "%d batches in a row changed nothing. In %d of the last one's %d groups all samples had the same "
                "reward; veto/* and mis/fraction tell how many were rejected. report.completions_interval shows some",
                *(self.idle, metrics["groups/no_signal"], len(batch.groups)),
            )

    def is_due(self, interval: int) -> bool:
        """True every `interval` batches and after the last batch; never if `interval` is 0."""
        return interval > 0 and (self.step % interval == 0 or self.step == self.settings.steps)

    def shows_completions(self) -> bool:
        interval = self.settings.report.completions_interval
        return self.is_due(interval) or (self.step == 1 and interval > 0)

    def completions(self, batch: Batch, *, updated: bool) -> list[Completion]:
        """Some completions of the batch trained last; `updated` if it made a step."""
        feeder = self.feeder
        rows = [feeder.asked.prompts.row_at(job_position(scored.group.job_id)[0]) for scored in batch.groups]
        return pick_completions(batch, self.learner, rows, feeder.scorer.tokenizer, updated=updated)

    @property
    def is_best(self) -> bool:
        return self.best is not None and self.best[0] == self.step

    async def evaluate(self) -> dict[str, float]:
        """Held-out scores of the weights announced last."""
        assert self.evaluator is not None, "evaluate.interval without data.heldout is refused by the settings"
        with self.watch.measure("eval", "evaluating on the held-out prompts"):
            score = await self.evaluator.evaluate()
        if self.best is None or score.avg > self.best[1]:
            self.best = (self.step, score.avg)
        return {"heldout/score": score.avg, **score.metrics()}

    async def next_batch(self) -> Batch:
        """The feeder's next batch. While the broker is too full for new prompts, saves checkpoints to free room."""
        waiting = asyncio.ensure_future(self.feeder.next_batch())
        try:
            while not waiting.done():
                full = asyncio.ensure_future(self.feeder.full_of_the_past())
                await asyncio.wait((waiting, full), return_when=asyncio.FIRST_COMPLETED)
                full.cancel()
                if not waiting.done():
                    logger.info("saving an early checkpoint: the broker is too full for the next prompts")
                    await self.save()
            return waiting.result()
        finally:
            waiting.cancel()

    async def save(self) -> None:
        """Writes a checkpoint, and only then acknowledges what it covers."""
        progress = Progress(
            step=self.step,
            weight_steps=self.weight_steps,
            samples=self.samples,
            seq=self.publisher.announced.seq,
            best=self.best,
            **self.feeder.cover(),
        )
        with patient("writing a checkpoint"):
            await asyncio.to_thread(self.checkpoints.save, progress, self.learner.save)
        await self.feeder.acknowledge()
        await self.publisher.pin(self.checkpoints.seqs())
        await sweep_broker(self.replicas.broker)

    def sending(self) -> Iterator[Coroutine[Any, Any, None]]:
        """The background task that sends weights, if there is a sender."""
        if self.sender is not None:
            yield self.sender.run()

    async def beat(self) -> None:
        """Reports the run's progress to the broker until cancelled."""
        while True:
            await self.tell()
            await asyncio.sleep(BEAT_S)

    async def tell(self) -> None:
        feeder, version = self.feeder, self.publisher.announced.version
        beat = TrainerBeat(self.step, version, feeder.waiting_s(), feeder.rewards_awaited(), int(self.finished))
        await self.replicas.beat_trainer(beat, fence=feeder.fence)
        told = await self.replicas.told()
        self.watch.tell_swaps({name: replica.swaps_s for name, replica in told.items()})
        self._warn({name: replica.wrong for name, replica in told.items() if replica.wrong})

    def _warn(self, wrong: dict[str, str]) -> None:
        """Logs once which replicas are wrong."""
        for name, why in wrong.items() - self.wrong.items():
            logger.warning("replica %s takes no work: %s", name, why)
        for name in self.wrong.keys() - wrong.keys():
            logger.info("replica %s takes work again", name)
        self.wrong = wrong
