"""What every engine does. tests/integration/engines/test_conformance.py holds each one that computes to it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

from dvp_rl.contract.group import EngineFacts, Sample
from dvp_rl.contract.job import Job
from dvp_rl.contract.transfer import Offer, TransferRequest


class Engine(Protocol):
    """Samples from the constrained policy. Used from one event loop; the heavy work runs elsewhere.

    `start` and `close` are called once each. Any number of `generate` calls may run at once.
    """

    facts: EngineFacts
    context_length: int
    """Largest number of tokens, prompt and continuation together."""
    vocab_size: int
    capacity: int
    """Samples that generate side by side; more than that only wait."""
    job_by_job: bool
    """One job generates at a time, however many samples it has, and gets other bits if it is divided."""

    @property
    def version(self) -> str:
        """The weight version that the next token will be drawn from."""

    @property
    def num_running(self) -> int:
        """Samples that generate now, at most `capacity`."""

    async def start(self) -> None:
        """Loads the model and is ready. Raises ConfigError if the folder is no usable model."""

    async def generate(self, job: Job) -> tuple[Sample, ...]:
        """Exactly job.n finished samples, every token stamped with the version that drew it.

        Cancelling the task stops the samples at the next token and frees their cache.
        Raises RequestError if the job cannot run here (prompt + one token longer than the context, token id outside the
        vocabulary), EngineError if generation failed (logits that are not finite, engine died), UnavailableError before
        `start` and after `close`.
        """

    async def load(self, folder: Path, version: str) -> None:
        """Swaps to verified weights at a token boundary. Samples in flight go on under the new weights with their cache
        recomputed. Raises WeightError and serves the old weights on if the folder does not fit."""

    async def close(self) -> None:
        """Fails what is in flight with EngineError and frees the model."""


@runtime_checkable
class Recovering(Protocol):
    """What an engine adds whose server may die and comes back by itself."""

    @property
    def outage(self) -> str:
        """Why nothing can be generated now; "" while it can."""

    async def recovered(self) -> None:
        """Returns when there is no outage."""


async def recovered(engine: Engine) -> None:
    """Returns when it has no outage."""
    if isinstance(engine, Recovering):
        await engine.recovered()


@runtime_checkable
class Receiving(Protocol):
    """What an engine adds that takes weights from a process group."""

    def transfer_request(self, version: str) -> TransferRequest:
        """What to ask the trainer for. Raises WeightError if this engine, as it was started, can only read folders, and
        UnavailableError while it has an outage."""

    async def receive(self, offer: Offer) -> None:
        """`Engine.load` from where the offer says. Raises WeightError; what is served then is `version`, which can be
        older than before, for weights that came this way are kept nowhere else."""
