"""One thread, as the tensors of the method's tests are small, too."""

from tests.unit.dvp.conftest import one_thread

__all__ = ["one_thread"]
