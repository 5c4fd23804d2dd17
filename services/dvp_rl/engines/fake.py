"""An engine with a fixed service time and no model, for load tests of queue and service without torch or a GPU."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dvp_rl.contract.errors import EngineError, UnavailableError, WeightError
from dvp_rl.contract.group import EngineFacts, FinishReason, Sample, VersionSpan
from dvp_rl.contract.job import Job

from .limits import check_fits, max_new_tokens
from .protocol import PromptTokens
from .seeds import UniformStream, sample_seed


@dataclass(eq=False)
class Flight:
    """A sample in flight. `spans`: (version, index of its first token)."""

    num_tokens: int
    started_at: float
    spans: list[tuple[str, int]] = field(default_factory=list)


class FakeEngine:
    """See dvp_rl.engines.protocol.Engine. Every sample takes `service_time_s` and has `num_tokens` random tokens.

    `num_tokens` is limited by the job's max_tokens and the context. `load_time_s`: duration of a swap; samples in
    flight continue meanwhile. As in the other engines, samples are a function of seed and index.
    """

    draws_canaries = False

    def __init__(
        self,
        *,
        service_time_s: float = 0.05,
        num_tokens: int = 32,
        capacity: int = 64,
        context_length: int = 4096,
        vocab_size: int = 1024,
        load_time_s: float = 0.0,
        version: str = "local:0:0",
    ) -> None:
        self.facts = EngineFacts(name="fake", version="1", dtype="float32")
        self.context_length = context_length
        self.vocab_size = vocab_size
        self.capacity = capacity
        self.job_by_job = False
        self.prompt_tokens = PromptTokens()
        self._service_time_s = service_time_s
        self._load_time_s = load_time_s
        self._num_tokens = num_tokens
        self._version = version
        self._slots = asyncio.Semaphore(capacity)
        self._flights: set[Flight] = set()
        self._jobs: set[asyncio.Future[list[Sample]]] = set()
        self._running = False

    @property
    def version(self) -> str:
        return self._version

    @property
    def num_running(self) -> int:
        """Number of samples that hold a slot."""
        return len(self._flights)

    async def start(self) -> None:
        self._running = True

    async def generate(self, job: Job) -> tuple[Sample, ...]:
        self._check_running()
        check_fits(job, context_length=self.context_length, vocab_size=self.vocab_size)
        self.prompt_tokens = self.prompt_tokens.plus(PromptTokens(read=job.n * len(job.prompt_ids)))
        samples = asyncio.gather(*(self._sample(job, index) for index in range(job.n)))
        self._jobs.add(samples)
        try:
            return tuple(await samples)
        except asyncio.CancelledError:
            if self._running:
                raise
            raise EngineError("the engine was closed") from None
        finally:
            self._jobs.discard(samples)

    async def load(self, folder: Path, version: str) -> None:
        self._check_running()
        if not await asyncio.to_thread(_has_weights, folder):
            raise WeightError(f"weight folder {folder}: no *.safetensors file in it")
        await asyncio.sleep(self._load_time_s)
        self._version = version
        for flight in self._flights:
            flight.spans.append((version, self._drawn(flight)))

    async def close(self) -> None:
        self._running = False
        for samples in self._jobs:
            samples.cancel()

    def _check_running(self) -> None:
        if not self._running:
            raise UnavailableError("the engine is not running: start it first, and do not use it after close")

    def _drawn(self, flight: Flight) -> int:
        """Tokens that a real engine would have drawn by now, evenly over the service time."""
        elapsed = asyncio.get_running_loop().time() - flight.started_at
        share = min(1.0, elapsed / self._service_time_s) if self._service_time_s > 0 else 1.0
        return int(share * flight.num_tokens)

    async def _sample(self, job: Job, index: int) -> Sample:
        async with self._slots:
            limit = max_new_tokens(job, self.context_length)
            flight = Flight(min(self._num_tokens, limit), asyncio.get_running_loop().time(), [(self._version, 0)])
            self._flights.add(flight)
            try:
                await asyncio.sleep(self._service_time_s)
            finally:
                self._flights.discard(flight)
        reason = FinishReason.LENGTH if flight.num_tokens == limit else FinishReason.STOP
        return _random_sample(sample_seed(job, index), flight, self.vocab_size, reason)


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


def _random_sample(seed: int, flight: Flight, vocab_size: int, reason: FinishReason) -> Sample:
    """A sample drawn uniformly from the vocabulary, without pruning."""
    T = flight.num_tokens
    uniforms = UniformStream(seed).next(T)
    starts = [start for _, start in flight.spans]
    spans = zip(flight.spans, [*starts[1:], T], strict=True)
    return Sample(
        token_ids=(uniforms * vocab_size).astype(np.int32),
        logprobs=np.full(T, -np.log(vocab_size), np.float32),
        kept_mass=np.ones(T, np.float32),
        kept_count=np.full(T, vocab_size, np.int32),
        finish_reason=reason,
        versions=tuple(VersionSpan(version=v, start=start, end=end) for (v, start), end in spans if start < end),
        seed=seed,
    )
