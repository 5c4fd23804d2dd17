"""Names of the engines that can be studied. The command line imports this module, so it must not import torch."""

from __future__ import annotations

from enum import StrEnum


class Engine(StrEnum):
    FP32 = "transformers-fp32"
    BF16 = "transformers-bf16"
    BF16_FP32_HEAD = "transformers-bf16-fp32-head"
    """bfloat16 with the LM head in float32."""
    FP8 = "transformers-fp8"
    """Linear layers, except the LM head, as products of fp8 matrices; the rest in bfloat16."""
    FP8_WEIGHTS = "transformers-fp8-weights"
    FP8_KV = "transformers-fp8-kv"
    GAUSSIAN = "gaussian"
    """The control: fresh Gaussian noise on every logit, s = NOISE of sources.py."""
    SGLANG_FP32 = "sglang-fp32"
    SGLANG_BF16_KV = "sglang-bf16-kv"
    SGLANG_BF16 = "sglang-bf16"

    @property
    def is_sglang(self) -> bool:
        return self.startswith("sglang")
