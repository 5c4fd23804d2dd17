"""Transports kept mass and kept count from the device to `meta_info`, one number per token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float32

Values: TypeAlias = list[float | int | None]
"""[batch]; None in rows that were not pruned."""


class HostCopy:
    """An asynchronous copy to the host. It is read after the step's tokens, when it is complete."""

    def __init__(self, kept: Float32[Tensor, "2 batch"], info: dict[str, Any]) -> None:
        device = kept.device
        self._kept, self._info = kept.to("cpu", non_blocking=True), info
        self._done = None if device.type == "cpu" else torch.get_device_module(device).Event()
        if self._done is not None:
            self._done.record()

    @cached_property
    def columns(self) -> dict[str, Values]:
        """By name. The first read also puts them into `info`: SGLang then reads the other rows from plain lists."""
        if self._done is not None:
            self._done.synchronize()
        masses, counts = self._kept.tolist()
        found: dict[str, Values] = {
            "kept_mass": [mass if count else None for mass, count in zip(masses, counts, strict=True)],
            "kept_count": [int(count) or None for count in counts],
        }
        self._info.update(found)
        return found


@dataclass(frozen=True)
class Column:
    """Kept masses or kept counts, which SGLang indexes by a request's row once the step is over."""

    copy: HostCopy
    name: str

    def __getitem__(self, row: int) -> float | int | None:
        return self.copy.columns[self.name][row]


def add_kept(info: dict[str, Any], kept: Float32[Tensor, "2 batch"]) -> None:
    """Adds the entries to `LogitsProcessorOutput.customized_info`. `kept`: the result of `prune`."""
    copy = HostCopy(kept, info)
    info |= {name: Column(copy, name) for name in ("kept_mass", "kept_count")}
