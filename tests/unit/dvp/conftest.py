"""Tests run with one thread: their tensors are so small that synchronising threads would only slow them down."""

from collections.abc import Iterator

import pytest
import torch

from tests.kit.devices import device

__all__ = ["device", "one_thread"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
