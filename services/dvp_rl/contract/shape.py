"""The fixed shape in which engine and trainer compute the same bits (services/dvp_rl/engines/fixed_shape.py)."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import Field

ShapeText = Annotated[str, Field(pattern=r"^[1-9]\d{0,5}x[1-9]\d{0,6}$")]
"""A shape as text: ROWSxLENGTH."""


class Shape(NamedTuple):
    """Shape of the token ids in every forward pass."""

    rows: int
    """Sequences per forward pass; also hidden states that go through the LM head at a time."""
    length: int
    """Longest sequence, prompt and completion together."""

    @classmethod
    def parse(cls, text: str) -> Shape:
        rows, length = text.split("x")
        return cls(int(rows), int(length))

    def __str__(self) -> str:
        return f"{self.rows}x{self.length}"
