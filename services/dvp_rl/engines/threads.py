"""How many CPU threads PyTorch computes with."""

from __future__ import annotations

import torch

from dvp_rl.cpus import usable_cpus


def num_threads(asked: int | None, *, reproducible: bool) -> int:
    """As many as asked for (0 and None: not asked). Else one where every bit has to be the same again, and otherwise as
    many as PyTorch would take, but no more than the CPUs of this process: PyTorch does not see a container's limit."""
    return asked or (1 if reproducible else min(torch.get_num_threads(), usable_cpus()))
