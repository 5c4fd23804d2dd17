"""Names of the engines that generate."""

from __future__ import annotations

from enum import StrEnum


class EngineName(StrEnum):
    TRANSFORMERS = "transformers"
    SGLANG = "sglang"
    VLLM = "vllm"
    FAKE = "fake"
