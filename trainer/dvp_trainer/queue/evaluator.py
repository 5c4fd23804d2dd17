"""Held-out scores through the `eval` sink: same replicas, same weights, no effect on training."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from itertools import islice

from dvp_rl.contract.errors import UnavailableError
from dvp_rl.contract.group import DeadLetter, FinishReason
from dvp_rl.contract.job import Job, Sink, own_prefix
from dvp_rl.transport.groups import Delivery, GroupQueue
from dvp_rl.transport.health import who_plays
from dvp_rl.transport.pending import who_holds
from dvp_rl.transport.submission import Submission
from dvp_trainer.config import TrainSettings
from dvp_trainer.data.prompts import Row
from dvp_trainer.data.rendering import Asked
from dvp_trainer.data.scoring import Scorer
from dvp_trainer.publish.publisher import Publisher

from .feeder import READ_BLOCK_MS, READ_COUNT, RECHECK_S
from .passk import HeldOutScore, score_held_out

logger = logging.getLogger(__name__)


class Evaluator:
    """Submits all held-out prompts under the weights announced last, and waits for all groups."""

    def __init__(
        self,
        settings: TrainSettings,
        asked: Asked,
        scorer: Scorer,
        submission: Submission,
        groups: GroupQueue,
        publisher: Publisher,
        fence: int,
    ) -> None:
        self.settings, self.asked, self.scorer = settings, asked, scorer
        self._submission, self._groups, self._publisher, self._fence = submission, groups, publisher, fence
        self._number = 0

    async def evaluate(self) -> HeldOutScore:
        """avg@n, pass@k and the truncated share. A prompt whose job died counts as wrong and is logged.

        Raises UnavailableError if the groups do not all arrive within evaluate.timeout_s.
        """
        self._number += 1
        rows = {self._job_id(row): row for row in islice(self.asked.prompts, self.settings.evaluate.limit)}
        await self._submit(rows)
        rewards: list[tuple[float, ...]] = []
        truncated: list[bool] = []
        deadline, heard = time.monotonic() + self.settings.evaluate.timeout_s, time.monotonic()
        while rows:
            now = time.monotonic()
            if now > deadline:
                raise UnavailableError(
                    f"evaluation: {len(rows)} groups are missing after evaluate.timeout_s = "
                    f"{self.settings.evaluate.timeout_s:g} s. GET /v1/queue on any replica says why"
                )
            deliveries = await self._groups.read(READ_COUNT, READ_BLOCK_MS, Sink.EVAL)
            if deliveries:
                heard = now
            elif now - heard > RECHECK_S:
                heard = now
                await self._recheck(rows)
            # Groups of an evaluation that a crash interrupted may still arrive; they are acknowledged and ignored.
            expected = [(d, rows.pop(d.job_id)) for d in deliveries if d.job_id in rows]
            rewards += await asyncio.gather(*(self._rewards(delivery, row) for delivery, row in expected))
            truncated += [flag for delivery, _ in expected for flag in _truncated(delivery)]
            await self._groups.acknowledge(deliveries)
        return score_held_out(rewards, truncated, correct_from=self.settings.evaluate.correct_from)

    async def _submit(self, rows: Mapping[str, Row]) -> None:
        await self._submission.submit([self._job(id, row) for id, row in rows.items()], fence=self._fence, limit=0)

    async def _recheck(self, rows: Mapping[str, Row]) -> None:
        """Announces and submits again after silence: the broker may have been wiped or may have refused the jobs."""
        broker = self._groups.broker
        whom = await (who_plays(broker) if self.settings.episodes.harness else who_holds(broker, rows))
        logger.info("still waiting for %d held-out groups: %s", len(rows), whom)
        await self._publisher.announce_again()
        self._groups.look_again()
        await self._submit(rows)

    def _job_id(self, row: Row) -> str:
        """Id with the weight version and the number of the evaluation. A resumed trainer announces a new version, so an
        interrupted evaluation starts over. Batches without signal keep the version, and a finished job is not drawn
        again, so the number tells evaluations apart."""
        own = own_prefix(self.settings.run_id)
        return f"{own}eval:{self._publisher.announced.seq}:{self._number}:{row.index}"

    def _job(self, id: str, row: Row) -> Job:
        settings = self.settings
        return Job(
            job_id=id,
            run_id=settings.run_id,
            **self.asked.of(row),
            n=settings.evaluate.n,
            # The same seed at every evaluation, so that only the weights change the score.
            sampling=settings.evaluate.to_sampling(settings.sampling, seed=row.index),
            sink=Sink.EVAL,
            min_seq=self._publisher.announced.seq,
            submitted_at=time.time(),
        )

    async def _rewards(self, delivery: Delivery, row: Row) -> tuple[float, ...]:
        if isinstance(delivery.item, DeadLetter):
            logger.error("held-out prompt %d: job %s is dead: %s", row.index, delivery.job_id, delivery.item.error)
            return (0.0,) * self.settings.evaluate.n
        return (await self.scorer.score(delivery.item, row)).rewards


def _truncated(delivery: Delivery) -> list[bool]:
    if isinstance(delivery.item, DeadLetter):
        return []
    return [last.finish_reason is FinishReason.LENGTH for *_, last in delivery.item.episodes]
