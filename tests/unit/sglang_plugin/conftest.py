"""Runs these tests on one thread, like the method's tests: their tensors are small."""

from tests.kit.devices import device
from tests.unit.dvp.conftest import one_thread

__all__ = ["device", "one_thread"]
