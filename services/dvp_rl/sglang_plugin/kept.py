"""Copies kept mass and kept count from the device to `meta_info`, one number per token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from .pruning import Kept


class HostCopy:
    """An asynchronous copy to the host. It is read after the step's tokens, when it is complete."""

    def __init__(self, kept: Kept) -> None:
        device = kept.kept_mass.device
        # float32 holds every count below 2^24; one copy instead of two.
        self._values = torch.stack((kept.kept_mass.float(), kept.kept_count.float())).to("cpu", non_blocking=True)
        self._done = None if device.type == "cpu" else torch.get_device_module(device).Event()
        if self._done is not None:
            self._done.record()

    @cached_property
    def mass(self) -> list[float | None]:
        """[batch]; None in rows that were not pruned."""
        return [mass if count else None for mass, count in self._rows]

    @cached_property
    def count(self) -> list[int | None]:
        """[batch]; None in rows that were not pruned."""
        return [int(count) or None for _, count in self._rows]

    @cached_property
    def _rows(self) -> list[tuple[float, float]]:
        if self._done is not None:
            self._done.synchronize()
        return list(zip(*self._values.tolist(), strict=True))


@dataclass(frozen=True)
class Column:
    """`HostCopy.mass` or `.count`, which SGLang indexes by a request's row once the step is over."""

    copy: HostCopy
    field: str

    def __getitem__(self, row: int) -> float | int | None:
        values: list[float | None] = getattr(self.copy, self.field)
        return values[row]


def meta_info(kept: Kept) -> dict[str, Column]:
    """The entries for `LogitsProcessorOutput.customized_info`."""
    copy = HostCopy(kept)
    return {"kept_mass": Column(copy, "mass"), "kept_count": Column(copy, "count")}
