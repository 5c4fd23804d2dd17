"""Micro-batches: tensors of sequences that fit into memory together.

Shapes: a micro-batch has b sequences; T is its longest completion.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from dvp_rl.contract.shape import Shape
from dvp_rl.dvp.policy import Constrained
from dvp_trainer.data.batch import TrainSequence

from .arrangement import Beside, lay_out
from .layout import Layout, Tokens, fixed

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor


@dataclass(frozen=True)
class MicroBatch:
    rows: Int[Tensor, " b"]
    """Index of each sequence in the batch's [N] vectors."""
    layout: Layout
    token_ids: Int[Tensor, "b T"]
    """Completion tokens; 0 where padded."""
    mask: Bool[Tensor, "b T"]
    """True on model tokens."""
    infer: Constrained
    """[b, T] fields from the engine. Padding has log-prob 0, kept mass 1, kept count 1 and is inside."""

    @classmethod
    def collate(cls, sequences: list[TrainSequence], layout: Layout) -> MicroBatch:
        device = layout.input_ids.device
        shape = len(sequences), max(len(sequence.sample.token_ids) for sequence in sequences)
        token_ids, mask = np.zeros(shape, np.int64), np.zeros(shape, bool)
        logprobs, mass, count = np.zeros(shape, np.float32), np.ones(shape, np.float32), np.ones(shape, np.int64)
        for row, sequence in enumerate(sequences):
            sample = sequence.sample
            t = len(sample.token_ids)
            token_ids[row, :t], mask[row, :t] = sample.token_ids, True
            logprobs[row, :t], mass[row, :t], count[row, :t] = sample.logprobs, sample.kept_mass, sample.kept_count
        rows = np.array([sequence.index for sequence in sequences])

        def tensor(array: npt.NDArray[Any]) -> Tensor:
            return torch.from_numpy(array).to(device)

        infer = Constrained(tensor(logprobs), tensor(mass), tensor(count), tensor(np.ones(shape, bool)))
        return cls(tensor(rows), layout, tensor(token_ids), tensor(mask), infer)

    def idle(self) -> MicroBatch:
        """The same micro-batch without model tokens: forward and backward run but contribute nothing."""
        layout = self.layout._replace(before=self.layout.before[:0])
        return replace(self, mask=torch.zeros_like(self.mask), layout=layout)


def micro_batches(
    sequences: list[TrainSequence],
    *,
    max_tokens: int,
    beside: Beside,
    pad_id: int,
    device: torch.device,
    shape: Shape | None = None,
) -> Iterator[MicroBatch]:
    """Micro-batches in the given order, each of the fixed `shape` if there is one, otherwise cut by `fill`."""
    if shape is None:
        parts = fill(sequences, max_tokens=max_tokens, beside=beside)
    else:
        parts = (sequences[start : start + shape.rows] for start in range(0, len(sequences), shape.rows))
    for part in parts:
        tokens = [Tokens(sequence.prompt_ids, sequence.sample.token_ids) for sequence in part]
        layout = lay_out(beside, tokens, pad_id, device) if shape is None else fixed(tokens, shape, device)
        yield MicroBatch.collate(part, layout)


def fill(sequences: list[TrainSequence], *, max_tokens: int, beside: Beside) -> Iterator[list[TrainSequence]]:
    """Cuts into lists of at most `max_tokens` tokens, but at least one sequence. Padding counts if there is any. A
    prompt counts once per sample, as it does in the memory that attention takes."""
    if beside is Beside.ALONE:
        max_tokens = 0
    start = total = prompt = completion = 0
    for stop, sequence in enumerate(sequences):
        p, t = len(sequence.prompt_ids), len(sequence.sample.token_ids)
        padded = (stop + 1 - start) * (max(prompt, p) + max(completion, t))
        if stop > start and (total + p + t if beside is Beside.PACKED else padded) > max_tokens:
            yield sequences[start:stop]
            start, total, prompt, completion = stop, 0, 0, 0
        total, prompt, completion = total + p + t, max(prompt, p), max(completion, t)
    if sequences:
        yield sequences[start:]


def share(sequences: list[TrainSequence], rank: int, size: int) -> list[TrainSequence]:
    """The part for `rank`: one of `size` contiguous stretches with about equal numbers of tokens."""
    lengths = np.array([sequence.num_tokens for sequence in sequences])
    middle = lengths.cumsum() - lengths / 2
    return [s for s, part in zip(sequences, middle * size // max(lengths.sum(), 1), strict=True) if part == rank]
