"""What a replica calls in vLLM's workers, by /collective_rpc (--worker-extension-cls)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from .versions import installed_version

PLAIN_LOGPROBS = "processed_logprobs"


class WorkerExtension:
    """vLLM adds it to the bases of its workers. Names begin with `dvp_`, so that they meet none of vLLM's."""

    vllm_config: Any
    model_runner: Any

    def dvp_facts(self) -> dict[str, Any]:
        from vllm.platforms import current_platform

        config = self.vllm_config
        return {
            "version": installed_version(),
            "device": current_platform.device_type,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "max_model_len": config.model_config.max_model_len,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "num_tokens": config.cache_config.num_gpu_blocks * config.cache_config.block_size,
            "num_running": self.model_runner.input_batch.num_reqs,
            "problems": self._dvp_problems(),
        }

    def _dvp_problems(self) -> list[str]:
        """Settings under which log-probs or kept masses would not match the tokens, or weights would not be swapped."""
        config = self.vllm_config
        model, parallel = config.model_config, config.parallel_config
        found = {
            "--speculative-config": config.speculative_config is not None,
            "--pipeline-parallel-size": parallel.pipeline_parallel_size != 1,
            "--data-parallel-size": parallel.data_parallel_size != 1,
            f"--scheduling-policy {config.scheduler_config.policy}": config.scheduler_config.policy != "priority",
            f"--logprobs-mode {model.logprobs_mode}": model.logprobs_mode != PLAIN_LOGPROBS,
            "VLLM_USE_V2_MODEL_RUNNER": config.use_v2_model_runner,
            f"heads of {model.get_head_size()} on a CPU": self._dvp_unsupported_heads(),
        }
        return [name for name, is_set in found.items() if is_set]

    def _dvp_unsupported_heads(self) -> bool:
        """vLLM's attention for CPUs checks the size only once it computes, and ends then."""
        from vllm.platforms import current_platform
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        size = self.vllm_config.model_config.get_head_size()
        return current_platform.is_cpu() and size not in CPUAttentionBackend.get_supported_head_sizes()

    def dvp_load(self, folder: str) -> str:
        """Loads a weight folder. Returns why it could not, or ""."""
        try:
            self.model_runner.reload_weights(weights_path=folder)
            renew_tied(self.model_runner.get_model())
        except Exception as error:  # noqa: BLE001 - whatever it is, the replica is told
            return f"{type(error).__name__}: {error}"
        return ""


def renew_tied(model: torch.nn.Module) -> None:
    """Prepares shared matrices again. On a CPU, vLLM multiplies by copies of its matrices, and its own reload renews
    that of the layer under whose name a tensor is saved, not that of a head that is tied to it."""
    layers: list[Any] = [layer for layer in model.modules() if isinstance(getattr(layer, "weight", None), torch.Tensor)]
    uses = Counter(layer.weight.data_ptr() for layer in layers if layer.weight.numel())
    for layer in layers:
        if hasattr(layer, "cpu_linear") and uses[layer.weight.data_ptr()] > 1:
            layer.quant_method.process_weights_after_loading(layer)
