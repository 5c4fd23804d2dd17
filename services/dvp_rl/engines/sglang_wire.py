"""Translates jobs to SGLang requests, their answers to samples, and offers to requests that receive weights. A job is
one request with n equal prompts, each with its own id."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from pydantic import ValidationError

from dvp_rl.contract.errors import EngineError, RequestError
from dvp_rl.contract.group import FinishReason, Sample, VersionSpan
from dvp_rl.contract.job import Job
from dvp_rl.contract.transfer import Offer, Piece

from .protocol import PromptTokens
from .seeds import sample_seed

LEAST_LOG_MIN_P = -87.0
"""Smallest log_min_p: SGLang keeps min_p in float32, whose smallest normal number is e^-87.3."""
FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
PROBE = {"max_new_tokens": 1, "min_p": 1.0}
"""Keeps only the most likely token and its ties: its log-prob is -log(kept_count) where the plugin works."""

TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I8": "int8",
    "U8": "uint8",
    "I32": "int32",
    "I64": "int64",
}
"""PyTorch's names of safetensors dtypes; SGLang refuses other dtypes."""
CHECKED = "sha256="
"""Prefix of the plugin's load format: services/dvp_rl/sglang_plugin/checksum.py."""
EMPTY_PIECE = {"names": [], "dtypes": [], "shapes": [], "load_format": f"{CHECKED}{'0' * 64}", "flush_cache": False}
"""No weights, with a wrong checksum: only a server that verifies no checksums accepts it."""


def request_body(
    job: Job, request_ids: Sequence[str], limit: int, eos_ids: Iterable[int], *, urgent: bool = False
) -> dict[str, Any]:
    """The request for a job. `limit`: maximum number of new tokens per sample. `urgent`: a server with priorities draws
    it before what waits there. Raises RequestError for settings that SGLang cannot express."""
    sampling = job.sampling
    if sampling.log_min_p < LEAST_LOG_MIN_P:
        raise RequestError(
            f"sampling.log_min_p {sampling.log_min_p:g}: SGLang keeps min_p in float32; allowed are "
            f"{LEAST_LOG_MIN_P:g} to 0",
            [{"field": "sampling.log_min_p", "value": sampling.log_min_p, "allowed": f"{LEAST_LOG_MIN_P:g} to 0"}],
        )
    settings = {
        "max_new_tokens": limit,
        "temperature": sampling.temperature,
        # Greedy rows need no pruning.
        "min_p": math.exp(sampling.log_min_p) if sampling.temperature > 0 else 0.0,
        "stop": list(sampling.stop),
        "stop_token_ids": sorted({*eos_ids, *sampling.stop_token_ids}),
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "ignore_eos": False,
    }
    return {
        "rid": list(request_ids),
        "input_ids": [job.prompt_ids.tolist()] * job.n,
        "sampling_params": [settings | {"sampling_seed": sample_seed(job, i)} for i in range(job.n)],
        "return_logprob": True,
        **({"priority": 1} if urgent else {}),
    }


def probe_body() -> dict[str, Any]:
    """A request for one token, which shows whether the server has the plugin."""
    return {"input_ids": [0], "sampling_params": PROBE, "return_logprob": True}


def is_constrained(answer: Any) -> bool:
    """Whether the answer to `probe_body` comes from a server with the plugin."""
    info = answer["meta_info"]
    if "kept_count" not in info or "kept_mass" not in info:
        return False
    (logprob, _, _), *_ = info["output_token_logprobs"]
    count = info["kept_count"][0]
    return count is not None and abs(logprob + math.log(count)) < 1e-3


def to_samples(job: Job, answer: Any) -> tuple[Sample, ...]:
    """The samples of an answer. Raises EngineError if it was aborted, is malformed or its logits are not finite."""
    if not isinstance(answer, list) or len(answer) != job.n:
        raise EngineError(f"job {job.job_id}: SGLang did not answer with {job.n} samples")
    try:
        return tuple(_to_sample(job, index, entry) for index, entry in enumerate(answer))
    except (KeyError, TypeError, IndexError, ValidationError) as error:
        raise EngineError(
            f"job {job.job_id}: SGLang's answer is not as expected: {type(error).__name__}: {error}"
        ) from None


def prompt_tokens(job: Job, answer: Any) -> PromptTokens:
    """Those of the samples of an answer that `to_samples` has accepted."""
    cached = sum(entry["meta_info"].get("cached_tokens", 0) for entry in answer)
    return PromptTokens(job.n * len(job.prompt_ids) - cached, cached)


def _to_sample(job: Job, index: int, entry: Any) -> Sample:
    info, token_ids = entry["meta_info"], entry["output_ids"]
    reason = info["finish_reason"]
    if reason["type"] not in FINISH:
        raise EngineError(f"job {job.job_id}: SGLang ended sample {index} early: {reason.get('message', reason)}")
    T = len(token_ids)
    greedy = job.sampling.temperature == 0
    kept_mass, kept_count = ([1] * T, [1] * T) if greedy else (info["kept_mass"][:T], info["kept_count"][:T])
    t = next((t for t, count in enumerate(kept_count) if count is None), None)
    if t is not None:
        raise EngineError(
            f"job {job.job_id}: the logits of sample {index} are not finite at position {len(job.prompt_ids) + t} "
            f"(prompt {len(job.prompt_ids)} tokens, new token {t}) under {info['weight_version']}"
        )
    return Sample(
        token_ids=token_ids,
        logprobs=np.zeros(T, np.float32) if greedy else [entry[0] for entry in info["output_token_logprobs"][:T]],
        kept_mass=kept_mass,
        kept_count=kept_count,
        finish_reason=FINISH[reason["type"]],
        versions=tuple(_spans(info["weight_versions"], T)),
        seed=sample_seed(job, index),
    )


def _spans(spans: Sequence[dict[str, Any]], T: int) -> Iterable[VersionSpan]:
    for span in spans:
        start, end = span["start"], min(span["end"], T)
        if start < end:
            yield VersionSpan(version=span["version"], start=start, end=end)


def group_body(offer: Offer) -> dict[str, Any]:
    return {
        "master_address": offer.host,
        "master_port": offer.port,
        "rank_offset": 1,
        "world_size": offer.size,
        "group_name": offer.group,
        "backend": offer.backend,
    }


def piece_body(piece: Piece, group: str, version: str | None) -> dict[str, Any]:
    """The request for one piece. `version`: version of the complete weights, set with the last piece only."""
    return {
        "names": [tensor.name for tensor in piece.tensors],
        "dtypes": [TORCH_NAMES.get(tensor.dtype, tensor.dtype) for tensor in piece.tensors],
        "shapes": [list(tensor.shape) for tensor in piece.tensors],
        "group_name": group,
        "load_format": f"{CHECKED}{piece.sha256}",
        "flush_cache": version is not None,
        "weight_version": version,
    }
