"""The protocol of every engine. tests/integration/engines/test_conformance.py checks each engine that runs a model."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from dvp_rl.contract.group import EngineFacts, Sample
from dvp_rl.contract.job import Job
from dvp_rl.contract.transfer import Offer, TransferRequest


class Engine(Protocol):
    """Samples from the constrained policy. Used from one event loop; the heavy work runs elsewhere.

    `start` and `close` are called once each. Any number of `generate` calls may run at once.
    """

    facts: EngineFacts
    context_length: int
    """Maximum number of tokens, prompt and continuation together."""
    vocab_size: int
    capacity: int
    """Number of samples that generate concurrently; further samples wait."""
    job_by_job: bool
    """Whether one job generates at a time, whatever its number of samples; dividing a job would change its bits."""

    @property
    def version(self) -> str:
        """The weight version that the next token will be drawn under."""

    @property
    def num_running(self) -> int:
        """Number of samples being generated, at most `capacity`."""

    async def start(self) -> None:
        """Loads the model and makes the engine ready. Raises ConfigError if the folder holds no usable model."""

    async def generate(self, job: Job) -> tuple[Sample, ...]:
        """Generates exactly job.n finished samples, with every token stamped with the version that drew it.

        Cancelling the task stops the samples at the next token and frees their cache.
        Raises RequestError if the job cannot run here (prompt + one token longer than the context, token id outside the
        vocabulary, group too large), EngineError if generation failed (logits not finite, engine closed meanwhile),
        UnavailableError before `start`, after `close` and in an outage.
        """

    async def load(self, folder: Path, version: str) -> None:
        """Swaps to verified weights at a token boundary. Samples in flight continue under the new weights with their
        cache recomputed. If the folder does not fit, raises WeightError and keeps serving the old weights."""

    async def close(self) -> None:
        """Fails jobs in flight with EngineError and frees the model."""


@runtime_checkable
class Recovering(Protocol):
    """Additional members of an engine whose server may die and recovers by itself."""

    num_starts: int
    """How often its server has been started, and has loaded its weights from a folder."""

    @property
    def outage(self) -> str:
        """Why the engine cannot generate; "" while it can."""

    async def recovered(self) -> None:
        """Waits until there is no outage."""


async def recovered(engine: Engine) -> None:
    """Waits until the engine has no outage."""
    if isinstance(engine, Recovering):
        await engine.recovered()


@runtime_checkable
class Preferring(Protocol):
    """Additional method of an engine in which jobs wait for each other."""

    async def generate_first(self, job: Job) -> tuple[Sample, ...]:
        """Like `generate`, before the jobs that wait."""


async def generate_first(engine: Engine, job: Job) -> tuple[Sample, ...]:
    """Generates a job as early as the engine can."""
    return await (engine.generate_first if isinstance(engine, Preferring) else engine.generate)(job)


def draws_canaries(engine: Engine) -> bool:
    """False for an engine that says so by an attribute of this name: it has no model, or adds tokens of its own."""
    found: bool = getattr(engine, "draws_canaries", True)
    return found


class PromptTokens(NamedTuple):
    """Tokens of the prompts of all samples so far."""

    read: int = 0
    """Those that the model computed."""
    cached: int = 0
    """Those computed before, for an earlier prompt, answer or sample."""

    def plus(self, more: PromptTokens) -> PromptTokens:
        return PromptTokens(self.read + more.read, self.cached + more.cached)


@runtime_checkable
class Caching(Protocol):
    """An additional attribute of an engine that counts which tokens of prompts it read, and which it knew."""

    prompt_tokens: PromptTokens


@runtime_checkable
class Receiving(Protocol):
    """Additional methods of an engine that receives weights over a process group."""

    def transfer_request(self, version: str) -> TransferRequest:
        """The request to send to the trainer. Raises WeightError if this engine, as started, can only read folders, and
        UnavailableError during an outage."""

    async def receive(self, offer: Offer) -> None:
        """Like `Engine.load`, from the sender that the offer names. After a WeightError the engine serves `version`,
        which can be older than before, because received weights are stored nowhere else."""
