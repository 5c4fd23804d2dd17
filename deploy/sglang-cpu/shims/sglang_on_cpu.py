"""Lets an unpatched SGLang run without a GPU; sglang_on_cpu.pth imports it in every process of the environment.

The torchvision wheel on PyPI links to the CUDA build of torch, so its operators do not load with the CPU build.
torchvision then fails on import, where it describes two of them to the compiler. Nothing here calls them, so declaring
their schemas is enough.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

GC_THRESHOLD = 50_000
"""New objects between two garbage collections. Python's 700 slows down SGLang's imports, whose objects stay."""
DEFAULTS = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",  # models are local folders
}
OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class DeclareOperators(MetaPathFinder):
    """Declares OPERATORS just before torchvision is first imported; never finds a module itself."""

    library: object = None  # an operator lives as long as the library that declared it

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision" and self.library is None:
            import torch

            self.library = library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
            for schema in OPERATORS:
                library.define(schema)  # type: ignore[no-untyped-call]
        return None


for name, value in DEFAULTS.items():
    os.environ.setdefault(name, value)
sys.meta_path.insert(0, DeclareOperators())
gc.set_threshold(GC_THRESHOLD)
