"""The production engine: an SGLang server with the dvp-sglang plugin (served.py).

Sampling, log-probs, kept mass and kept count come from inside SGLang. Besides folders, it receives weights:

    transfer  join the trainer's process group -> as a swap, with every piece verified before it is loaded
    timeout   of a transfer, or no answer: kill the server, which can no longer be queried or trusted

After a transfer the last folder is the model that the engine was started with, under its own version, because no folder
is guaranteed to keep weights that were sent.

Seeds are passed on to SGLang, which honours them only with --enable-deterministic-inference (not on a CPU).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from dvp_rl.contract.errors import ConfigError, DvpError, WeightError
from dvp_rl.contract.group import EngineFacts
from dvp_rl.contract.job import Job
from dvp_rl.contract.transfer import Offer, TransferRequest
from dvp_rl.weights.layout import check_tensors

from .limits import max_new_tokens
from .served import Answer, ServedEngine, Weights
from .server import LocalServer
from .sglang_client import SglangClient
from .sglang_server import Launch, Remote
from .sglang_wire import is_constrained, probe_body, prompt_tokens, request_body, to_samples

JOIN_S = 60.0
"""Longest wait for SGLang to join the trainer's process group, in seconds; it generates nothing meanwhile."""
INSTALL = "pip install dvp-sglang in the environment that SGLang runs in, and start SGLang again"


class SglangEngine(ServedEngine[SglangClient]):
    """See ServedEngine and dvp_rl.engines.protocol.Receiving."""

    NAME, TITLE = "sglang", "SGLang"

    def __init__(self, model: Path, source: Launch | Remote, **options: Any) -> None:
        super().__init__(model, source, **options)
        self._dp, self._tp = (source.dp, source.tp) if isinstance(source, Launch) else (1, 1)

    async def _admit(self) -> None:
        if not is_constrained(await self._client.generate(probe_body())):
            raise ConfigError(
                f"the SGLang server at {self._client.url} lacks the dvp-sglang plugin, or refused to load it: its "
                f"log-probs cover the whole vocabulary and cannot be trained on; {INSTALL}"
            )
        info = await self._client.server_info()
        dtype = self._model_dtype if info["dtype"] == "auto" else info["dtype"]
        fp32_head = info.get("enable_fp32_lm_head", False)
        self.facts = EngineFacts(name=self.NAME, version=info["version"], dtype=dtype, fp32_head=fp32_head)
        pool = info["max_total_num_tokens"] - 2 * info["page_size"]
        longest = min(info["max_req_input_len"], pool)
        self.context_length = min(self.context_length or longest, longest)
        self._dp, self._tp = info["dp_size"], info["tp_size"]
        states = info["internal_states"]
        self.capacity = sum(state["effective_max_running_requests_per_dp"] for state in states)

    async def _serves(self, weights: Weights) -> bool:
        return Weights(*await self._client.served()) == weights

    async def _ask(self, job: Job, request_ids: Sequence[str], *, urgent: bool) -> Answer:
        limit = max_new_tokens(job, self.context_length)
        answer = await self._client.generate(request_body(job, request_ids, limit, self._eos_ids, urgent=urgent))
        return Answer(to_samples(job, answer), prompt_tokens(job, answer))

    def transfer_request(self, version: str) -> TransferRequest:
        if not isinstance(self._server, LocalServer):
            raise WeightError("the server at sglang.url can only load folders: this replica could not restart it")
        if self._dp > 1:
            raise WeightError(f"sglang.dp {self._dp}: SGLang can receive weights only with dp 1; start more replicas")
        self._check_running()
        return TransferRequest(id=uuid4().hex, version=version, receivers=self._tp, device=self._server.device)

    async def receive(self, offer: Offer) -> None:
        self._check_running()
        offered = {tensor.name: tensor for piece in offer.pieces for tensor in piece.tensors}
        check_tensors(offer.version, offered, self._layout, self._optional)
        await asyncio.shield(self._in_background(self._transfer(offer)))

    async def _transfer(self, offer: Offer) -> None:
        async with self._changing:
            self._check_running()
            try:
                async with asyncio.timeout(self._load_timeout_s):
                    await self._receive(offer)
            except WeightError:
                raise  # the server refused and serves the last folder
            except (DvpError, TimeoutError) as error:
                await self._server.stop()
                why = str(error) or f"it took over {JOIN_S:g} s to join, or over {self._load_timeout_s:g} s in all"
                raise WeightError(f"SGLang did not receive {offer.version} and is being restarted: {why}") from None
            self._last_folder, self._version = self._model, offer.version

    async def _receive(self, offer: Offer) -> None:
        async with asyncio.timeout(JOIN_S):
            if refusal := await self._client.join(offer):
                raise WeightError(f"SGLang did not reach the trainer at {offer.host}:{offer.port}: {refusal}")
        refusal = await self._while_paused(lambda: self._client.receive(offer, self._load_timeout_s))
        await self._client.leave(offer)
        if refusal:
            raise WeightError(f"SGLang did not receive {offer.version}: {refusal}")
