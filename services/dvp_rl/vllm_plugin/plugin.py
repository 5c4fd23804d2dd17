"""The entry point, and what it changes in vLLM."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from multiprocessing import parent_process
from threading import Thread
from typing import Any

import torch

from ..dvp.pruning import prune
from .packing import pack
from .versions import installed_version, refusal

KEPT = "dvp_kept"
"""Attribute of vLLM's min-p processor: what it kept of this step's batch, or None."""
PRUNING = "dvp_pruning"
"""Attribute of its sampler: the min-p processors of the step in progress."""


def register() -> None:
    """vLLM calls it in each of its processes. Raises SystemExit if it cannot work here."""
    if reason := refusal(installed_version()):
        raise SystemExit(reason)
    from vllm.distributed import utils
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
    from vllm.v1.sample.sampler import Sampler

    if not hasattr(MinPLogitsProcessor, KEPT):
        setattr(MinPLogitsProcessor, KEPT, None)
        MinPLogitsProcessor.apply = constrain
        Sampler.forward = stepping(Sampler.forward)
        Sampler.gather_logprobs = packing(Sampler.gather_logprobs, LogprobsTensors)
        # Zero the blocks of the cache before use: a NaN that one sample left there would spoil later ones.
        KVCacheConfig.needs_kv_cache_zeroing = True
        if current_platform.is_cpu():
            # Its attention in bfloat16 uses AMX, if there is any, without asking the kernel: SIGILL.
            torch.cpu._init_amx()
            # Its processes wait for each other in a loop. With sched_yield, others get no CPU for seconds (Linux 6.18).
            utils.USE_SCHED_YIELD = False
        end_with_parent()


def end_with_parent() -> None:
    """Ends this process with the one that started it, if that is vLLM too: its engine and workers would outlive a
    server that is killed, and keep its GPUs."""
    parent = parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    Thread(target=wait, name="end-with-parent", daemon=True).start()


def constrain(processor: Any, logits: torch.Tensor) -> torch.Tensor:
    """In place of MinPLogitsProcessor.apply: prunes logits that are divided by the temperature already."""
    if processor.min_p_count:
        setattr(processor, KEPT, prune(logits, processor.min_p.view(-1), torch.ones_like(processor.min_p)))
    return logits


def stepping(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Sampler.forward that lets `packing` find what min-p kept."""

    @wraps(forward)
    def stepped(sampler: Any, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        processors = [p for p in sampling_metadata.logitsprocs.argmax_invariant if hasattr(p, KEPT)]
        setattr(sampler, PRUNING, processors)
        try:
            return forward(sampler, logits, sampling_metadata, *args, **kwargs)
        finally:
            setattr(sampler, PRUNING, ())
            for processor in processors:
                setattr(processor, KEPT, None)

    return stepped


def packing(gather: Callable[..., Any], tensors: Callable[..., Any]) -> Callable[..., Any]:
    """Sampler.gather_logprobs that sends what min-p kept in the place of ranks. It counts no ranks if only log-probs of
    drawn tokens are requested, as our engine does. `tensors`: vLLM's LogprobsTensors."""

    @wraps(gather)
    def packed(sampler: Any, logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:
        found = [kept for each in getattr(sampler, PRUNING, ()) if (kept := getattr(each, KEPT)) is not None]
        if not found:
            return gather(logprobs, num_logprobs, token_ids)
        ranks = pack(found[0])
        if num_logprobs:
            return gather(logprobs, num_logprobs, token_ids)._replace(selected_token_ranks=ranks)
        drawn = token_ids.unsqueeze(-1)
        return tensors(drawn.int(), logprobs.gather(-1, drawn), ranks)

    return packed
