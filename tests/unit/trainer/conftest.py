"""Runs these tests on one thread, like the method's tests: their tensors are small."""

from tests.unit.dvp.conftest import one_thread

__all__ = ["one_thread"]
