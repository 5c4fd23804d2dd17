"""The SGLang versions that this plugin was tested with."""

from __future__ import annotations

import os
from importlib.metadata import version

TESTED = ("0.5.23",)
ANY_VERSION = "DVP_SGLANG_ANY_VERSION"
"""Environment variable: 1 allows other versions."""


def refusal(installed: str) -> str | None:
    """Why the plugin refuses this SGLang, or None. A local version (0.5.23+cu130) is only another build."""
    if installed.partition("+")[0] in TESTED or os.environ.get(ANY_VERSION) == "1":
        return None
    return (
        f"dvp-sglang is tested with SGLang {', '.join(TESTED)}; this is {installed}. "
        f"Install a tested version, set {ANY_VERSION}=1 to try this one, or set SGLANG_PLUGINS=none to serve without it"
    )


def installed_version() -> str:
    return version("sglang")
