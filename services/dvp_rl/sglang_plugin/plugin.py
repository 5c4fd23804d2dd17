"""The entry point, and the hooks on SGLang."""

from __future__ import annotations

import dataclasses
import logging
import os
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..dvp.pruning import prune
from .checksum import receive_checked
from .kept import add_kept
from .versions import ANY_VERSION, installed_version, refusal

SAMPLER = "sglang.srt.layers.sampler.Sampler.forward"
RECEIVE = (
    "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.receive_weights_from_distributed"
)
CHECK = "sglang.srt.server_args.ServerArgs.check_server_args"
PLAIN = {
    "speculative_algorithm": None,
    "dllm_algorithm": None,
    "enable_watermark": False,
    "disaggregation_mode": "null",
    "pp_size": 1,
}
"""Required server arguments: under other values some tokens bypass the hook, or its results get lost."""
ORIGINAL_LOGPROB = "SGLANG_RETURN_ORIGINAL_LOGPROB"
"""SGLang's environment variable for log-probs before temperature."""

logger = logging.getLogger(__name__)


def register() -> None:
    """Registers the hooks. SGLang calls it in each of its processes, before it reads the model.

    Raises SystemExit if the plugin cannot work here. SGLang only logs other exceptions of a plugin and serves without
    it: its log-probs would silently be those of another policy.
    """
    if reason := refusal(installed_version()):
        raise SystemExit(reason)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target in (SAMPLER, RECEIVE, CHECK):
        _find(target)
    HookRegistry.register(SAMPLER, constrain_sampler, HookType.AROUND)
    HookRegistry.register(RECEIVE, receive_checked, HookType.AROUND)
    HookRegistry.register(CHECK, refuse_bypasses, HookType.BEFORE)
    logger.info("dvp-sglang: min_p gives constrained log-probs, kept_mass and kept_count")


def _find(target: str) -> None:
    """Raises SystemExit if a hook's target is missing: SGLang would only log that and serve without the hook."""
    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError) as error:
        raise SystemExit(
            f"dvp-sglang finds no {target} in SGLang {installed_version()} ({error}): {ANY_VERSION}=1 does not help. "
            "Install a tested version, or set SGLANG_PLUGINS=none to serve without dvp-sglang"
        ) from None


def constrain_sampler(
    forward: Callable[..., Any], sampler: Any, logits_output: Any, sampling_info: Any, *args: Any, **kwargs: Any
) -> Any:
    """Prunes the rows with min_p before SGLang's sampler sees them; its softmax is then the constrained policy.

    Grammar masks, penalties and logit biases are already in the logits; custom logit processors are applied here, so
    that the set is taken from the logits actually sampled. top_k and top_p act on the pruned distribution and, as in
    SGLang without the plugin, do not enter the log-probs. A batch without min_p passes unchanged. In other batches
    log-probs are float32, whatever the server's arguments.
    """
    if not sampling_info.need_min_p_sampling:
        return forward(sampler, logits_output, sampling_info, *args, **kwargs)
    logits = logits_output.next_token_logits
    if sampling_info.has_custom_logit_processor:
        from sglang.srt.layers.sampler import apply_custom_logit_processor

        apply_custom_logit_processor(logits, sampling_info)
    logits_output.customized_info = dict(logits_output.customized_info or {})
    add_kept(logits_output.customized_info, prune(logits, sampling_info.min_ps, sampling_info.temperatures))
    pruned = dataclasses.replace(sampling_info, need_min_p_sampling=False, has_custom_logit_processor=False)
    with _in_float32(sampler):
        return forward(sampler, logits_output, pruned, *args, **kwargs)


@contextmanager
def _in_float32(sampler: Any) -> Iterator[None]:
    """Keeps SGLang from rounding logits to bfloat16, as --rl-on-policy-target does to match a trainer that rounds."""
    before = sampler.rl_on_policy_target, sampler.use_log_softmax_logprob
    sampler.rl_on_policy_target, sampler.use_log_softmax_logprob = None, False
    try:
        yield
    finally:
        sampler.rl_on_policy_target, sampler.use_log_softmax_logprob = before


def refuse_bypasses(server_args: Any) -> None:
    """Raises SystemExit for settings under which log-probs or kept masses would not match the tokens."""
    used = [f"--{name.replace('_', '-')}" for name, plain in PLAIN.items() if getattr(server_args, name) != plain]
    if os.environ.get(ORIGINAL_LOGPROB, "").lower() in ("1", "true"):
        used.append(ORIGINAL_LOGPROB)
    if used:
        raise SystemExit(
            f"dvp-sglang does not work together with {', '.join(used)}: log-probs or kept masses would not be those of "
            "the constrained policy. Leave that out, or set SGLANG_PLUGINS=none to serve without dvp-sglang"
        )
