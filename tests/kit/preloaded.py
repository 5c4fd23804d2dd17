"""Imports of the interpreter that forks our services (forked.py)."""

from __future__ import annotations

import importlib

import psutil

for name in (
    *("torch", "transformers", "transformers.models.qwen3.modeling_qwen3", "tests.kit.forked"),
    *("dvp_rl.rollout.server", "dvp_rl.engines.transformers", "dvp_rl.monitor.cli", "dvp_rl.monitor.server"),
    *("dvp_trainer.loop", "dvp_trainer.setup"),
):
    importlib.import_module(name)
assert psutil.Process().num_threads() == 1, "a fork would lose the other threads"
