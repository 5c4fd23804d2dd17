"""Translates jobs to vLLM requests and their answers to samples. Each sample is a request of its own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from dvp_rl.contract.errors import EngineError, RequestError
from dvp_rl.contract.group import FinishReason, Sample, VersionSpan
from dvp_rl.contract.job import Job
from dvp_rl.vllm_plugin.packing import unpack

from .protocol import PromptTokens
from .seeds import sample_seed

LEAST_LOG_MIN_P = -87.0
"""Smallest log_min_p: vLLM keeps min_p in float32, whose smallest normal number is e^-87.3."""
FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
LEAST_TEMPERATURE = 1e-2
"""vLLM takes smaller ones for this."""


class Facts(BaseModel):
    """What a worker says of itself: services/dvp_rl/vllm_plugin/worker.py."""

    model_config = ConfigDict(frozen=True)

    version: str
    device: str
    """cpu or cuda, whatever vLLM was built for."""
    dtype: str
    max_model_len: int
    max_num_seqs: int
    num_tokens: int
    """Capacity of the KV cache, in tokens."""
    num_running: int
    """Samples in its batch."""
    problems: tuple[str, ...]
    """Why its samples could not be trusted."""


def request_bodies(
    job: Job, request_ids: Sequence[str], limit: int, eos_ids: Iterable[int], *, urgent: bool = False
) -> list[dict[str, Any]]:
    """One request for each sample. `limit`: maximum number of new tokens per sample. Raises RequestError for settings
    that vLLM cannot express."""
    sampling = job.sampling
    if sampling.log_min_p < LEAST_LOG_MIN_P:
        raise _beyond("log_min_p", sampling.log_min_p, f"{LEAST_LOG_MIN_P:g} to 0")
    if 0 < sampling.temperature < LEAST_TEMPERATURE:
        raise _beyond("temperature", sampling.temperature, f"0, or at least {LEAST_TEMPERATURE:g}")
    settings = {
        "max_tokens": limit,
        "temperature": sampling.temperature,
        # Greedy rows need no pruning.
        "min_p": math.exp(sampling.log_min_p) if sampling.temperature > 0 else 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "stop": list(sampling.stop),
        "stop_token_ids": sorted({*eos_ids, *sampling.stop_token_ids}),
        "detokenize": bool(sampling.stop),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": 0,
    }
    return [
        {
            "request_id": request_id,
            "token_ids": job.prompt_ids.tolist(),
            "sampling_params": settings | {"seed": sample_seed(job, index)},
            "priority": -1 if urgent else 0,
        }
        for index, request_id in enumerate(request_ids)
    ]


def probe_body() -> dict[str, Any]:
    """A request for one token, which shows whether the server has the plugin: it keeps the most likely one only."""
    settings = {"max_tokens": 1, "min_p": 1.0, "logprobs": 0, "detokenize": False}
    return {"token_ids": [0], "sampling_params": settings}


def is_constrained(answer: Any) -> bool:
    """Whether the answer to `probe_body` comes from a server with the plugin."""
    (content,) = answer["choices"][0]["logprobs"]["content"]
    mass, count = unpack(content["rank"] or 0)
    return count > 0 and 0 < mass <= 1 and abs(content["logprob"] + math.log(count)) < 1e-3


def to_sample(job: Job, index: int, answer: Any) -> Sample:
    """Raises EngineError if the answer was aborted, is malformed or its logits are not finite."""
    try:
        return _to_sample(job, index, answer["choices"][0])
    except (KeyError, TypeError, IndexError, ValidationError) as error:
        raise EngineError(
            f"job {job.job_id}: vLLM's answer is not as expected: {type(error).__name__}: {error}"
        ) from None


def prompt_tokens(job: Job, answers: Sequence[Any]) -> PromptTokens:
    """Those of the samples of answers that `to_sample` has accepted."""
    details = [answer["usage"].get("prompt_tokens_details") or {} for answer in answers]
    cached = sum(each.get("cached_tokens") or 0 for each in details)
    return PromptTokens(len(answers) * len(job.prompt_ids) - cached, cached)


def _to_sample(job: Job, index: int, choice: Any) -> Sample:
    token_ids, contents = choice["token_ids"], choice["logprobs"]["content"]
    reason = choice["finish_reason"]
    if reason not in FINISH:
        raise EngineError(f"job {job.job_id}: vLLM ended sample {index} early: {reason}")
    T = len(token_ids)
    spans = choice["weight_versions"]
    greedy = job.sampling.temperature == 0
    kept = [(1.0, 1)] * T if greedy else [unpack(content["rank"] or 0) for content in contents]
    t = next((t for t, (_, count) in enumerate(kept) if count == 0), None)
    if t is not None:
        raise EngineError(
            f"job {job.job_id}: the logits of sample {index} are not finite at position {len(job.prompt_ids) + t} "
            f"(prompt {len(job.prompt_ids)} tokens, new token {t}) under {spans[0]['version']}"
        )
    return Sample(
        token_ids=token_ids,
        logprobs=np.zeros(T, np.float32) if greedy else [content["logprob"] for content in contents],
        kept_mass=[mass for mass, _ in kept],
        kept_count=[count for _, count in kept],
        finish_reason=FINISH[reason],
        versions=tuple(VersionSpan(version=span["version"], start=span["start"], end=span["end"]) for span in spans),
        seed=sample_seed(job, index),
    )


def _beyond(name: str, value: float, allowed: str) -> RequestError:
    field = f"sampling.{name}"
    return RequestError(
        f"{field} {value:g}: vLLM allows {allowed}", [{"field": field, "value": value, "allowed": allowed}]
    )
