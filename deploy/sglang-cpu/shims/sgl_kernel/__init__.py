"""Stand-in for SGLang's compiled CPU kernels. Dense models import their names but never call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def missing(name: str) -> Callable[..., NoReturn]:
    """A kernel that raises NotImplementedError with its name when it is called."""

    def kernel(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is a compiled kernel, which this CPU environment does not have")

    return kernel


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)
    return missing(name)
