"""Model inputs for sequences: one packed row without padding, padded rows, or rows of a fixed shape.

Shapes: b sequences; P is their longest prompt and T their longest completion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dvp_rl.contract.errors import ConfigError
from dvp_rl.contract.shape import Shape

from .attention import Rows

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor

SHORTEST_SHARE = 0.75
"""Share of a block's longest row below which a row starts the next block: attention pads rows to the longest."""


class Tokens(NamedTuple):
    """Token ids of one sequence; neither part is empty."""

    prompt: NDArray[np.integer[Any]]
    completion: NDArray[np.integer[Any]]
    is_model: NDArray[np.bool_]
    """Whether each completion token is trained on; the others are only read."""


class Layout(NamedTuple):
    input_ids: Int[Tensor, "rows columns"]
    position_ids: Int[Tensor, "rows columns"]
    attention_mask: Bool[Tensor, "rows columns"] | None
    """None if packed or of fixed shape."""
    before: Int[Tensor, " tokens"]
    """Flat position of the token before each model token, whose state predicts it; sequence by sequence."""
    packed_rows: Rows | None
    """Which tokens attend to which, if packed; otherwise None."""

    def idle(self) -> Layout:
        """The same layout without model tokens."""
        return self._replace(before=self.before[:0])

    def model_inputs(self) -> dict[str, Any]:
        names = "input_ids", "position_ids", "attention_mask" if self.packed_rows is None else "packed_rows"
        return {name: getattr(self, name) for name in names}


def padded(sequences: Sequence[Tokens], pad_id: int, device: torch.device) -> Layout:
    """A [b, P + T] layout in which all completions begin in the same column."""
    P, T = max(len(tokens.prompt) for tokens in sequences), max(len(tokens.completion) for tokens in sequences)
    input_ids = np.full((len(sequences), P + T), pad_id, np.int64)
    attention = np.zeros(input_ids.shape, bool)
    before = []
    for row, (prompt, completion, is_model) in enumerate(sequences):
        p, t = len(prompt), len(completion)
        input_ids[row, P - p : P], input_ids[row, P : P + t] = prompt, completion
        attention[row, P - p : P + t] = True
        before.append(row * (P + T) + P - 1 + is_model.nonzero()[0])
    return Layout(
        _tensor(input_ids, device),
        _tensor(np.maximum(attention.cumsum(1) - 1, 0), device),
        _tensor(attention, device),
        _tensor(np.concatenate(before), device),
        None,
    )


def fixed(sequences: Sequence[Tokens], shape: Shape, device: torch.device) -> Layout:
    """An [R, L] layout with sequences on the left and zeros elsewhere: see services/dvp_rl/engines/fixed_shape.py.
    Raises ConfigError if a sequence is longer than L."""
    input_ids, before = np.zeros(shape, np.int64), []
    for row, (prompt, completion, is_model) in enumerate(sequences):
        p, t = len(prompt), len(completion)
        if p + t > shape.length:
            raise ConfigError(
                f"model.fixed_shape {shape}: got a sequence of {p} + {t} tokens; replicas need the same fixed_shape"
            )
        input_ids[row, : p + t] = np.concatenate([prompt, completion])
        before.append(row * shape.length + p - 1 + is_model.nonzero()[0])
    positions = np.tile(np.arange(shape.length), (shape.rows, 1))
    return Layout(
        _tensor(input_ids, device), _tensor(positions, device), None, _tensor(np.concatenate(before), device), None
    )


def packed(sequences: Sequence[Tokens], device: torch.device) -> Layout:
    """A [1, L] layout with every prompt once, however many sequences share it, and without the last token of each
    completion, which is only predicted."""
    pieces: list[NDArray[np.integer[Any]]] = []
    rows: list[NDArray[np.int64]] = []
    prompts: dict[bytes, NDArray[np.int64]] = {}
    size = 0

    def place(token_ids: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        nonlocal size
        pieces.append(token_ids)
        size += len(token_ids)
        return np.arange(size - len(token_ids), size)

    for prompt, completion, _ in sequences:
        key = prompt.tobytes()
        if key not in prompts:
            prompts[key] = place(prompt)
        rows.append(np.concatenate([prompts[key], place(completion[:-1])]))
    positions = np.empty(size, np.int64)
    for row in rows:
        positions[row] = np.arange(len(row))
    before = [row[len(s.prompt) - 1 :][s.is_model] for row, s in zip(rows, sequences, strict=True)]
    return Layout(
        _tensor(np.concatenate(pieces, dtype=np.int64)[None], device),
        _tensor(positions[None], device),
        None,
        _tensor(np.concatenate(before), device),
        _attended(rows, size, device),
    )


def _attended(rows: list[NDArray[np.int64]], size: int, device: torch.device) -> Rows:
    """Blocks of rows of similar length; the output at a position that several rows share is taken from one of them."""
    blocks, cells, start = [], np.empty(size, np.int64), 0
    for block in _of_like_length(rows):
        index = np.zeros((len(block), len(block[0])), np.int64)
        for line, row in zip(index, block, strict=True):
            line[: len(row)] = row
            cells[row] = start + np.arange(len(row))
            start += index.shape[1]
        blocks.append(_tensor(index, device))
    return Rows(tuple(blocks), _tensor(cells, device))


def _of_like_length(rows: list[NDArray[np.int64]]) -> Iterator[list[NDArray[np.int64]]]:
    """Blocks of rows of similar length, longest first."""
    block: list[NDArray[np.int64]] = []
    for row in sorted(rows, key=len, reverse=True):
        if block and len(row) < SHORTEST_SHARE * len(block[0]):
            yield block
            block = []
        block.append(row)
    yield block


def _tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
