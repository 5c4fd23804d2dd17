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
"""Attribute of vLLM's min-p processor: what the last batch kept, or None."""


def register() -> None:
    """vLLM calls it in each of its processes. Raises SystemExit if it cannot work here."""
    if reason := refusal(installed_version()):
        raise SystemExit(reason)
    from vllm.distributed import utils
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
    from vllm.v1.sample.sampler import Sampler

    if not hasattr(MinPLogitsProcessor, KEPT):
        setattr(MinPLogitsProcessor, KEPT, None)
        MinPLogitsProcessor.apply = constrain
        Sampler.forward = packing(Sampler.forward)
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


def packing(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Sampler.forward that sends what min-p kept in the place of ranks."""

    @wraps(forward)
    def packed(sampler: Any, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        processors = [p for p in sampling_metadata.logitsprocs.argmax_invariant if hasattr(p, KEPT)]
        for processor in processors:
            setattr(processor, KEPT, None)
        output = forward(sampler, logits, sampling_metadata, *args, **kwargs)
        tensors = output.logprobs_tensors
        for processor in processors:
            kept = getattr(processor, KEPT)
            if tensors is not None and kept is not None:
                output.logprobs_tensors = tensors._replace(selected_token_ranks=pack(kept))
        return output

    return packed
