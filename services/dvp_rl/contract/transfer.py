"""The distributed weight route: a replica asks for a version, the trainer says where and how it will send it.

Bytes travel over a process group; what is said here travels through the broker. The checksums do too, so that a replica
serves what the trainer wrote or nothing, whoever else reaches the group.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .record import Record

Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class TensorSpec(Record):
    name: str
    dtype: str
    """As safetensors calls it: F32, BF16, .."""
    shape: tuple[int, ...]


class Piece(Record):
    """Tensors that travel as one buffer: their bytes, one after the other."""

    tensors: Annotated[tuple[TensorSpec, ...], Field(min_length=1)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class TransferRequest(Record):
    id: Hex
    version: str
    receivers: Annotated[int, Field(ge=1)]
    """Processes that take the weights, each all of them (tensor parallelism)."""
    device: str
    """Where they want them: cuda, cpu."""


class Offer(Record):
    """Rank 0 waits at host:port for the receivers, ranks 1 to size - 1, for a while."""

    version: str
    host: str
    port: Annotated[int, Field(ge=1, le=65535)]
    size: Annotated[int, Field(ge=2)]
    group: Hex
    backend: Literal["gloo", "nccl"]
    pieces: tuple[Piece, ...]


class TransferAnswer(Record):
    offer: Offer | None = None
    error: str = ""
    """Why there is none."""
