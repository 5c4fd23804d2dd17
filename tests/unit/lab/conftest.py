from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Limits torch to one thread: with small tensors, threads would only wait for each other."""
    torch.set_num_threads(1)
