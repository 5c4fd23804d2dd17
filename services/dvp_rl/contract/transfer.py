"""Messages of the distributed weight route: a replica asks for a version, the trainer says where and how it sends it.

The weights travel over a process group, these messages through the broker. The messages hold the checksums, so that a
replica serves only what the trainer wrote, even if others can reach the process group.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .canary import Canary
from .record import Record

Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class TensorSpec(Record):
    name: str
    dtype: str
    """Name of the dtype in safetensors: F32, BF16, ..."""
    shape: tuple[int, ...]


class Piece(Record):
    """Tensors that are sent as one buffer, their bytes concatenated."""

    tensors: Annotated[tuple[TensorSpec, ...], Field(min_length=1)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class TransferRequest(Record):
    id: Hex
    version: str
    receivers: Annotated[int, Field(ge=1)]
    """Processes that receive the weights, each all of them (tensor parallelism)."""
    device: str
    """Device on which they receive: cuda, cpu."""


class Offer(Record):
    """The trainer, rank 0, waits at host:port for the receivers, ranks 1 to size - 1, for a limited time."""

    version: str
    host: str
    port: Annotated[int, Field(ge=1, le=65535)]
    size: Annotated[int, Field(ge=2)]
    group: Hex
    backend: Literal["gloo", "nccl"]
    pieces: tuple[Piece, ...]
    canary: Canary | None = None


class TransferAnswer(Record):
    offer: Offer | None = None
    error: str = ""
    """Why there is no offer."""
