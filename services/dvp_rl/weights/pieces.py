"""A weight folder as the stretches of bytes in which it is sent; neither sender nor receiver needs a model for that."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from dvp_rl.contract.errors import WeightError
from dvp_rl.contract.transfer import Piece, TensorSpec

from .layout import Stored, check_finite, read_layout

PIECE_BYTES = 1 << 28
"""Largest piece, unless a single tensor is larger. A receiver needs this much memory besides its weights."""
ALIGNMENT = 8
"""Alignment of each tensor within its piece, in bytes; no number is wider."""


class Stretch(NamedTuple):
    """Bytes [start, end) of a file: whole tensors, one after the other."""

    file: Path
    start: int
    end: int
    tensors: list[TensorSpec]

    def continues(self, stored: Stored, limit: int) -> bool:
        """True if the tensor can be appended to the stretch."""
        adjacent = stored.file == self.file and stored.start == self.end
        return adjacent and (self.end - self.start) % ALIGNMENT == 0 and stored.end - self.start <= limit


def stretches(folder: Path, limit: int = PIECE_BYTES) -> list[Stretch]:
    """The folder's tensors in file order, in stretches of up to `limit` bytes; reads headers only. Raises
    WeightError."""
    found: list[Stretch] = []
    for name, stored in sorted(read_layout(folder).items(), key=lambda item: (item[1].file, item[1].start)):
        if not found or not found[-1].continues(stored, limit):
            found.append(Stretch(stored.file, stored.start, stored.start, []))
        found[-1].tensors.append(TensorSpec(name=name, dtype=stored.dtype, shape=stored.shape))
        found[-1] = found[-1]._replace(end=stored.end)
    return found


def pieces(folder: Path, limit: int = PIECE_BYTES) -> tuple[Piece, ...]:
    """The stretches with their checksums. Reads every byte. Raises WeightError, also if a number is not finite."""
    for name, stored in read_layout(folder).items():
        check_finite(name, stored)
    try:
        return tuple(Piece(tensors=tuple(s.tensors), sha256=_sha256(s)) for s in stretches(folder, limit))
    except OSError as error:
        raise WeightError(f"weight folder {folder}: {error}") from None


def _sha256(stretch: Stretch, block: int = 1 << 20) -> str:
    digest = hashlib.sha256()
    with stretch.file.open("rb") as file:
        file.seek(stretch.start)
        for start in range(stretch.start, stretch.end, block):
            digest.update(file.read(min(block, stretch.end - start)))
    return digest.hexdigest()
