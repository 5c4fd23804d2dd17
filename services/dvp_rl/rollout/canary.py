"""Whether an engine computes with the weights that it is said to have: it draws what the trainer would draw.

Two jobs for each walk of the version's canary (dvp_rl.contract.canary):

    walk   its tokens at log_min_p = 0, which keeps the best token only: the mass kept is that token's probability
    set    one token under the run's policy: the number kept

They take the way of every other job, decoding and the engine's plugin included, but before those that wait. What
differs by more than rounding is a fault. How much rounding makes is learned from the first version that passes, unless
weights are rounded after the trainer has computed: the first one may lose nothing by that, and later ones something.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dvp_rl.contract.canary import MARGINS, Canary, Walk, coarser, margin_of
from dvp_rl.contract.errors import UnavailableError, WeightError
from dvp_rl.contract.job import Job, Sink
from dvp_rl.contract.sampling import Sampling
from dvp_rl.contract.weights import WeightVersion
from dvp_rl.engines.protocol import Engine, Recovering, draws_canaries, generate_first

from .metrics import Metrics

logger = logging.getLogger(__name__)

TIMEOUT_S = 600.0
"""Longest time for an engine to draw a canary, in seconds."""
LEARNED = 8.0
"""The limit, as a multiple of the first mean difference."""
MAX_STANDING = 64
"""Most versions that are remembered; a sample in flight spans no more."""


class Limits(NamedTuple):
    """Bounds of the limit on the mean difference of log-probs, in nats, whatever is learned."""

    least: float
    most: float


LIMITS = {"float64": Limits(2e-5, 0.02), "float32": Limits(2e-5, 0.02), "float16": Limits(2e-3, 0.05)}
LOW_LIMITS = Limits(0.01, 0.25)
"""For formats not in LIMITS: bfloat16, and those with fewer bits."""


class Finding(NamedTuple):
    """How an engine's draws compare with the trainer's."""

    differences: NDArray[np.float64]
    """Differences of the best token's log-prob, in nats, after each beginning that both have drawn."""
    num_others: int
    """Walks that left the trainer's at a token that was clearly the best."""
    num_sets: int
    """Sets of a size that the trainer's weights cannot have."""
    num_walks: int

    @property
    def mean(self) -> float:
        return float(self.differences.mean())

    @property
    def p99(self) -> float:
        return float(np.quantile(self.differences, 0.99))

    @property
    def max(self) -> float:
        return float(self.differences.max())


class Guard:
    """Examines an engine after every swap and recovery, and now and then. Until a version has passed, nothing that it
    drew leaves the replica."""

    def __init__(self, engine: Engine, metrics: Metrics, every_s: float) -> None:
        """`every_s`: seconds from one examination of the same weights to the next."""
        self._engine, self._metrics, self._every_s = engine, metrics, every_s
        self._canaries: dict[str, Canary] = {}
        """Those of the version served and of the one being loaded."""
        self._expected = ""
        """The version loaded last, or being loaded."""
        self._standing: dict[str, bool] = {}
        """Whether a version has passed, for the last MAX_STANDING versions with a canary."""
        self._passed: tuple[str, int] | None = None
        """The version that passed last, and how often the engine had started by then."""
        self._passed_at = -math.inf
        self.limit: float | None = None
        """Largest mean difference of log-probs that passes, in nats; None until it has been learned."""
        self.last: Finding | None = None
        self.wrong = ""
        """What is wrong with the weights served; "" if nothing is known to be."""
        self.failure = ""
        """Why the last examination failed, `wrong` or not; "" if it did not."""
        self.num_wrong = 0
        """Examinations so far that found something wrong."""

    @property
    def unproven(self) -> bool:
        """True from the first token under weights that have a canary until they have passed."""
        return self._engine.version in self._canaries and self._passed != self._served

    @property
    def due(self) -> bool:
        known = self._engine.version in self._canaries
        return self.unproven or (known and time.monotonic() > self._passed_at + self._every_s)

    @property
    def _served(self) -> tuple[str, int]:
        return self._engine.version, self._engine.num_starts if isinstance(self._engine, Recovering) else 0

    @contextmanager
    def expecting(self, version: str, canary: Canary | None) -> Iterator[None]:
        """The engine loads `version` inside. If that fails, what it serves then has to pass again."""
        self._canaries = {key: known for key, known in self._canaries.items() if key == self._engine.version}
        for known in (self._canaries, self._standing):
            known.pop(version, None)
        if canary is not None and draws_canaries(self._engine):
            self._canaries[version], self._standing[version] = canary, False
        if len(self._standing) > MAX_STANDING:
            del self._standing[next(iter(self._standing))]
        self._expected = version
        try:
            yield
        except BaseException:
            self._expected, self._passed = "", None
            raise

    def is_open(self, versions: Iterable[str]) -> bool:
        """Whether one of these versions, which have drawn, has yet to pass. Raises WeightError if one never will."""
        served = self._engine.version
        waiting = {v for v in versions if not self._standing.get(v, True) or (v == served and self.unproven)}
        if lost := waiting - {served, self._expected}:
            raise WeightError(f"{', '.join(sorted(lost))} drew some tokens, but never passed its canary")
        return bool(waiting)

    async def examine(self) -> None:
        """Examines the weights served, if they have a canary. Raises WeightError if the engine does not compute what
        the trainer did (see `wrong`), or does not answer."""
        served = self._served
        version, canary = served[0], self._canaries.get(served[0])
        try:
            self.wrong = "" if canary is None else await self._examine(canary)
            if self.wrong:
                self.num_wrong += 1
                self._standing[version] = False
                raise WeightError(self.wrong)
        except WeightError as error:
            self.failure, self._passed = str(error), None
            raise
        self.failure, self._passed, self._passed_at = "", served, time.monotonic()
        self._standing[version] = True

    async def _examine(self, canary: Canary) -> str:
        """What is wrong; "" if nothing is. Raises WeightError if the engine does not answer."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                finding = await _draw(self._engine, canary)
        except (UnavailableError, TimeoutError) as error:
            self._metrics.canaries.labels("undrawn").inc()
            raise WeightError(f"the canary was not drawn: {str(error) or f'not within {TIMEOUT_S:g} s'}") from error
        except Exception as error:  # noqa: BLE001 - such as NaN: an engine that cannot draw it is as bad as a wrong one
            self._metrics.canaries.labels("wrong").inc()
            return f"the engine cannot draw the canary: {error}"
        if finding is None:
            logger.warning("the canary is longer than this replica's context: its weights are not examined")
            return ""
        self.last = finding
        wrong = self._judge(finding, coarser(canary.dtype, self._engine.facts.dtype), learns=not canary.rounded)
        self._metrics.tell_canary(finding.mean, finding.p99, finding.max, right=not wrong)
        return wrong and f"the engine does not compute with these weights: {wrong}"

    def _judge(self, finding: Finding, dtype: str, *, learns: bool) -> str:
        bounds = LIMITS.get(dtype, LOW_LIMITS)
        limit = bounds.most if self.limit is None else self.limit
        wrong = []
        if finding.num_others:
            wrong.append(f"{finding.num_others} of {finding.num_walks} greedy walks leave the trainer's")
        if not finding.mean <= limit:
            wrong.append(
                f"log-probs differ from the trainer's by {finding.mean:.3g} nats on average and {finding.max:.3g} at "
                f"most; the limit in {dtype} is {limit:.3g} on average"
            )
        if finding.num_sets:
            wrong.append(f"{finding.num_sets} of {finding.num_walks} safe sets have another size")
        if not wrong and self.limit is None and learns:
            self.limit = min(max(LEARNED * finding.mean, bounds.least), bounds.most)
            logger.info(
                "canary: log-probs differ from the trainer's by %.3g nats on average, %.3g at most, over %d tokens in "
                "%s; the limit is %.3g on average from now on",
                *(finding.mean, finding.max, len(finding.differences), dtype, self.limit),
            )
        return "; ".join(wrong)


async def _draw(engine: Engine, canary: Canary) -> Finding | None:
    """None if the engine's context is too short for every walk. Raises EngineError, UnavailableError."""
    walks = [walk for walk in canary.walks if len(walk.prompt_ids) + len(walk.token_ids) <= engine.context_length]
    if not walks:
        return None
    policy = Sampling(log_min_p=canary.log_min_p, temperature=canary.temperature, max_tokens=1, seed=0)
    jobs = [_job(engine, walk, Sampling(log_min_p=0.0, max_tokens=len(walk.token_ids), seed=0)) for walk in walks]
    jobs += [_job(engine, walk, policy) for walk in walks]
    samples = [sample for (sample,) in await asyncio.gather(*(generate_first(engine, job) for job in jobs))]
    place = margin_of(coarser(canary.dtype, engine.facts.dtype))
    tie = 2 * MARGINS[place].nats
    differences, num_others, num_sets = [], 0, 0
    for walk, sample, first in zip(walks, samples, samples[len(walks) :], strict=False):
        ours, theirs = np.array(walk.token_ids), sample.token_ids
        length = min(len(ours), len(theirs))  # the engine ends at an end of sequence
        same = int((ours[:length] == theirs[:length]).cumprod().sum())
        alike = min(same + 1, length)
        # Tokens that tie are kept together.
        logprobs = np.log(sample.kept_mass[:alike].astype(np.float64) / sample.kept_count[:alike])
        differences.append(np.abs(logprobs - walk.logprobs[:alike]))
        num_others += same < length and walk.gaps[same] > tie
        fewest, most = walk.kept[place]
        num_sets += not fewest <= first.kept_count[0] <= most
    return Finding(np.concatenate(differences), num_others, num_sets, len(walks))


def _job(engine: Engine, walk: Walk, sampling: Sampling) -> Job:
    run_id = WeightVersion.parse(engine.version).run_id
    return Job(job_id="canary", run_id=run_id, prompt_ids=walk.prompt_ids, sampling=sampling, sink=Sink.CLIENT)
