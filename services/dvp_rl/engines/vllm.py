"""A vLLM server with the dvp-vllm plugin (served.py). Log-probs are vLLM's own; the plugin prunes, and adds kept mass
and kept count."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from dvp_rl.contract.errors import ConfigError
from dvp_rl.contract.group import EngineFacts
from dvp_rl.contract.job import Job

from .limits import max_new_tokens
from .served import Answer, ServedEngine, Weights
from .vllm_client import VllmClient
from .vllm_server import Launch, Remote
from .vllm_wire import is_constrained, probe_body, prompt_tokens, request_bodies, to_sample


class VllmEngine(ServedEngine[VllmClient]):
    """See ServedEngine."""

    NAME, TITLE = "vllm", "vLLM"

    def __init__(self, model: Path, source: Launch | Remote, **options: Any) -> None:
        super().__init__(model, source, **options)
        self._device = source.device if isinstance(source, Launch) else None
        self._rows = asyncio.Semaphore(1)
        """Those of vLLM twice over, so that one is never free while samples wait; more would only wait in sockets."""

    async def _admit(self) -> None:
        facts = await self._client.facts()
        if self._device not in (None, facts.device):
            raise ConfigError(
                f"device {self._device}: this vLLM is built for {facts.device}; set device = {facts.device}, or "
                "vllm.python to another environment"
            )
        if facts.problems:
            raise ConfigError(
                f"dvp-vllm does not work together with {', '.join(facts.problems)}: log-probs, kept masses or swaps "
                "would be wrong, or vLLM would fail; leave that out"
            )
        if not is_constrained(await self._client.generate(probe_body())):
            raise ConfigError(
                f"the vLLM server at {self._client.url} runs without the plugin of dvp-vllm: VLLM_PLUGINS leaves it out"
            )
        self.facts = EngineFacts(name=self.NAME, version=facts.version, dtype=facts.dtype)
        longest = min(facts.max_model_len, facts.num_tokens)
        self.context_length = min(self.context_length or longest, longest)
        self.capacity = facts.max_num_seqs
        self._rows = asyncio.Semaphore(2 * self.capacity)

    async def _serves(self, weights: Weights) -> bool:
        if self._device is None:
            return False  # a server that was started elsewhere does not say from which folder
        await self._client.label(weights.version)
        return True

    async def _ask(self, job: Job, request_ids: Sequence[str], *, urgent: bool) -> Answer:
        limit = max_new_tokens(job, self.context_length)
        bodies = request_bodies(job, request_ids, limit, self._eos_ids, urgent=urgent)

        async def draw(body: dict[str, Any]) -> Any:
            async with nullcontext() if urgent else self._rows:
                return await self._client.generate(body)

        try:
            async with asyncio.TaskGroup() as group:
                asking = [group.create_task(draw(body)) for body in bodies]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        answers = [task.result() for task in asking]
        samples = tuple(to_sample(job, index, answer) for index, answer in enumerate(answers))
        return Answer(samples, prompt_tokens(job, answers))
