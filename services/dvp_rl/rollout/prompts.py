"""Conversion between what people write and what engines read: requests to jobs, groups to responses."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError

from dvp_rl.contract.errors import RequestError, reason
from dvp_rl.contract.generate import GeneratedChoice, GenerateResponse
from dvp_rl.contract.group import Group, Sample
from dvp_rl.contract.http import JobRequest, RolloutRequest, RolloutResponse, SampleBody
from dvp_rl.contract.job import Job, Sink
from dvp_rl.contract.openai import CONTEXT_FULL
from dvp_rl.contract.record import describe
from dvp_rl.engines.limits import check_size

from .answers import in_pieces
from .dialogue import Dialogue, trim

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dvp_rl.engines.protocol import Engine
    from dvp_rl.engines.tokenizer import Tokenizer

A = TypeVar("A")
R = TypeVar("R")

PIECE_TOKENS = 8_192
"""Tokens per piece of a response. The last sample of a piece may exceed it: samples are never divided."""
NO_TEXT = "dvp:no_text"
"""Metadata key by which a queued job remembers `return_text: false`; clients never see it."""


class Prompts:
    def __init__(self, tokenizer: Tokenizer, engine: Engine) -> None:
        self._tokenizer = tokenizer
        self._engine = engine
        self._dialogue = Dialogue(tokenizer)
        self._thread = ThreadPoolExecutor(1, "tokenizer")

    async def job(self, request: RolloutRequest, run_id: str, *, field: str = "", at: str = "") -> Job:
        """The job for a request. `field`, `at`: where the client gave the prompt and n, if it asked in other words.
        Raises RequestError if it cannot run on this model."""
        prompt_ids = await self._in_thread(self._encode, request)
        given = next(name for name in ("prompt_ids", "prompt", "messages") if getattr(request, name) is not None)
        self.check(field or given, prompt_ids)
        named = request.job_id if isinstance(request, JobRequest) else None
        sampling = request.sampling.to_sampling()
        room = self._engine.context_length - len(prompt_ids)
        try:
            job = Job(
                job_id=named or uuid.uuid4().hex,
                run_id=run_id,
                prompt_ids=prompt_ids,
                n=request.n,
                sampling=sampling.model_copy(update={"max_tokens": min(sampling.max_tokens, room)}),
                sink=Sink.CLIENT,
                metadata=request.metadata if request.return_text else {**request.metadata, NO_TEXT: True},
                submitted_at=time.time(),
            )
        except ValidationError as error:
            errors: list[dict[str, object]] = [
                {"field": ".".join(map(str, item["loc"])), "value": None, "allowed": reason(item)}
                for item in error.errors()
            ]
            raise RequestError(describe("request", error), errors) from None
        check_size(job, self._engine.context_length, at)
        return job

    def response(self, group: Group) -> AsyncIterator[bytes]:
        """A RolloutResponse as JSON, in pieces."""
        metadata = {key: value for key, value in group.metadata.items() if key != NO_TEXT}
        fields = group.model_dump(mode="json", include={"job_id", "run_id", "prompt_ids", "engine"})
        stops = None if group.metadata.get(NO_TEXT) else group.sampling.stop
        samples = self._in_array(group.samples, lambda one: SampleBody.of(one, self._text(one, stops)))
        return in_pieces(RolloutResponse(**fields, metadata=metadata, samples=()), "samples", samples)

    def generated(self, body: GenerateResponse, samples: Sequence[Sample], *, logprobs: bool) -> AsyncIterator[bytes]:
        """`body` as JSON with its choices, in pieces."""
        numbers = count()
        choices = self._in_array(samples, lambda one: GeneratedChoice.of(next(numbers), one, logprobs=logprobs))
        return in_pieces(body, "choices", choices)

    async def _in_array(
        self, samples: Sequence[Sample], body_of: Callable[[Sample], BaseModel]
    ) -> AsyncIterator[bytes]:
        """The bodies of samples as a JSON array, in pieces."""

        def encode(few: Sequence[Sample]) -> bytes:
            return b",".join(body_of(sample).model_dump_json().encode() for sample in few)

        separator = b"["
        for few in _few_tokens(samples):
            yield separator + await self._in_thread(encode, few)
            separator = b","
        yield b"]"

    async def talk(self, function: Callable[[Dialogue], R]) -> R:
        """Calls `function` with the dialogue, off the event loop."""
        return await self._in_thread(function, self._dialogue)

    async def _in_thread(self, function: Callable[[A], R], argument: A) -> R:
        """Calls `function` off the event loop, on a single thread: the fast tokenizers are not re-entrant."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, argument)

    def _encode(self, request: RolloutRequest) -> list[int]:
        if request.prompt_ids is not None:
            return request.prompt_ids
        if request.messages is not None:
            return self._tokenizer.encode_chat(request.messages, request.chat_template_kwargs)
        assert request.prompt is not None, "RolloutRequest holds exactly one prompt"
        return self._tokenizer.encode(request.prompt)

    def check(self, field: str, prompt_ids: Sequence[int] | NDArray[np.int32]) -> None:
        """Raises RequestError, with `field`, unless the engine can read the prompt and draw a token after it."""
        longest = self._engine.context_length - 1
        if not 1 <= len(prompt_ids) <= longest:
            allowed = f"1 to {longest} tokens: a context of {self._engine.context_length} less one for the answer"
            raise RequestError.at(field, f"{len(prompt_ids)} tokens", allowed, CONTEXT_FULL)
        largest = np.max(prompt_ids)
        if largest >= self._engine.vocab_size:
            raise RequestError.at(field, f"token id {largest}", f"ids in [0, {self._engine.vocab_size})")

    def _text(self, sample: Sample, stops: Sequence[str] | None) -> str | None:
        if stops is None:
            return None
        text = self._tokenizer.decode(sample.token_ids.tolist())
        return text if sample.environment else trim(text, stops)  # the stop string of a turn may be in its middle


def _few_tokens(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    """Batches of samples with at least PIECE_TOKENS tokens each, own prompts too; the last batch may have fewer."""
    few: list[Sample] = []
    num_tokens = 0
    for sample in samples:
        few.append(sample)
        num_tokens += len(sample.token_ids) + (0 if sample.prompt_ids is None else len(sample.prompt_ids))
        if num_tokens >= PIECE_TOKENS:
            yield few
            few, num_tokens = [], 0
    if few:
        yield few
