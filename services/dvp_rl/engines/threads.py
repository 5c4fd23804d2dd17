"""Number of CPU threads that PyTorch computes with."""

from __future__ import annotations

import torch

from dvp_rl.cpus import usable_cpus


def num_threads(asked: int | None, *, reproducible: bool) -> int:
    """The number asked for. If that is 0 or None: 1 where results must be reproducible bit for bit, else PyTorch's
    default, but at most the CPUs of this process, because PyTorch does not see a container's limit."""
    return asked or (1 if reproducible else min(torch.get_num_threads(), usable_cpus()))
