"""From scored groups to padded tensors.

Shapes: G groups of n samples, N = G * n sequences; a micro-batch has b of them, P is its longest prompt and T its
longest completion. Prompts are padded on the left and completions on the right, so that completion token t stands in
column P + t of every row and one slice of the logits serves all rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import torch

from services.contract.group import FinishReason, Group, Sample

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor


@dataclass(frozen=True)
class ScoredGroup:
    """A group and what its samples are worth."""

    group: Group
    rewards: tuple[float, ...]
    """[n] as the advantages see them: after overlong shaping."""
    staleness: int
    """Optimizer steps between the oldest span of its samples and now."""
    num_failed: int = 0
    """Samples whose reward function failed."""
    reward_s: float = 0.0

    @property
    def has_signal(self) -> bool:
        """False if all rewards are equal: then every advantage is zero and no gradient can come of it."""
        return len(self.rewards) == 1 or min(self.rewards) < max(self.rewards)


@dataclass(frozen=True)
class TrainSequence:
    """Row `index` of the batch's [N] vectors."""

    index: int
    prompt_ids: np.ndarray
    sample: Sample

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.sample.token_ids)


@dataclass(frozen=True)
class Batch:
    """What one optimizer step is made of."""

    groups: tuple[ScoredGroup, ...]
    offset: int = 0
    """Row index of the first sequence."""

    @property
    def rewards(self) -> Float[Tensor, "G n"]:
        return torch.tensor([scored.rewards for scored in self.groups], dtype=torch.float64)

    @property
    def metadata(self) -> list[dict[str, Any]]:
        """Of each group's job."""
        return [scored.group.metadata for scored in self.groups]

    @property
    def num_sequences(self) -> int:
        return sum(len(scored.rewards) for scored in self.groups)

    @property
    def num_tokens(self) -> int:
        """Model tokens."""
        return sum(scored.group.num_tokens for scored in self.groups)

    def to_bytes(self) -> bytes:
        """For the other ranks of a world."""
        encoded: bytes = msgpack.packb(
            [[scored.group.to_bytes(), scored.rewards, scored.staleness] for scored in self.groups]
        )
        return encoded

    @classmethod
    def from_bytes(cls, data: bytes) -> Batch:
        groups = msgpack.unpackb(data)
        return cls(tuple(ScoredGroup(Group.from_bytes(g), tuple(rewards), stale) for g, rewards, stale in groups))

    def sequences_with_signal(self) -> list[TrainSequence]:
        """In order, with groups whose advantages are all zero left out: they cost no forward and no backward."""
        found, index = [], self.offset
        for scored in self.groups:
            samples = enumerate(scored.group.samples, start=index)
            if scored.has_signal:
                found += [TrainSequence(i, scored.group.prompt_ids, sample) for i, sample in samples]
            index += len(scored.rewards)
        return found

    def split(self, parts: int) -> list[Batch]:
        """`parts` mini-batches of whole groups, as equal as can be; row indices stay those of the whole batch."""
        size = -(-len(self.groups) // parts)
        n = len(self.groups[0].rewards)
        starts = range(0, len(self.groups), size)
        return [Batch(self.groups[start : start + size], self.offset + start * n) for start in starts]

    def complete(self) -> Bool[Tensor, "G n"]:
        """Samples that ended by themselves, not by max_tokens."""
        stopped = [[s.finish_reason is FinishReason.STOP for s in scored.group.samples] for scored in self.groups]
        return torch.tensor(stopped)


@dataclass(frozen=True)
class MicroBatch:
    """Sequences that fit into memory together."""

    rows: Int[Tensor, " b"]
    """Index of each sequence in the batch's [N] vectors."""
    input_ids: Int[Tensor, "b P+T"]
    attention_mask: Bool[Tensor, "b P+T"]
    position_ids: Int[Tensor, "b P+T"]
    token_ids: Int[Tensor, "b T"]
    """The completion; 0 where padded."""
    mask: Bool[Tensor, "b T"]
    """True on model tokens."""
    infer_logprobs: Float[Tensor, "b T"]
    """log pi_infer_mp; 0 where padded. Likewise kept mass 1 and kept count 1 where padded."""
    infer_kept_mass: Float[Tensor, "b T"]
    infer_kept_count: Int[Tensor, "b T"]

    @classmethod
    def collate(cls, sequences: list[TrainSequence], pad_id: int, device: torch.device) -> MicroBatch:
        b = len(sequences)
        P = max(len(sequence.prompt_ids) for sequence in sequences)
        T = max(len(sequence.sample.token_ids) for sequence in sequences)
        input_ids = np.full((b, P + T), pad_id, np.int64)
        attention = np.zeros((b, P + T), bool)
        logprobs, mass = np.zeros((b, T), np.float32), np.ones((b, T), np.float32)
        count = np.ones((b, T), np.int64)
        for row, sequence in enumerate(sequences):
            p, sample = len(sequence.prompt_ids), sequence.sample
            t = len(sample.token_ids)
            input_ids[row, P - p : P] = sequence.prompt_ids
            input_ids[row, P : P + t] = sample.token_ids
            attention[row, P - p : P + t] = True
            logprobs[row, :t], mass[row, :t], count[row, :t] = sample.logprobs, sample.kept_mass, sample.kept_count

        def tensor(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device)

        return cls(
            rows=torch.tensor([sequence.index for sequence in sequences], device=device),
            input_ids=tensor(input_ids),
            attention_mask=tensor(attention),
            position_ids=tensor(np.maximum(attention.cumsum(1) - 1, 0)),
            token_ids=tensor(np.where(attention[:, P:], input_ids[:, P:], 0)),
            mask=tensor(attention[:, P:]),
            infer_logprobs=tensor(logprobs),
            infer_kept_mass=tensor(mass),
            infer_kept_count=tensor(count),
        )

    def idle(self) -> MicroBatch:
        """The same without a model token: forward and backward run, and add nothing."""
        return replace(self, mask=torch.zeros_like(self.mask))


def micro_batches(
    sequences: list[TrainSequence], *, max_tokens: int, pad_id: int, device: torch.device
) -> Iterator[MicroBatch]:
    """Packs sequences, longest first, into micro-batches of at most `max_tokens` padded tokens (one sequence at least).

    Sorted by length so that little is padding; ties keep their order, so the packing is a function of the batch alone.
    """
    pending: list[TrainSequence] = []
    prompt = completion = 0
    for sequence in sorted(sequences, key=lambda s: -s.num_tokens):
        p, t = len(sequence.prompt_ids), len(sequence.sample.token_ids)
        if pending and (len(pending) + 1) * (max(prompt, p) + max(completion, t)) > max_tokens:
            yield MicroBatch.collate(pending, pad_id, device)
            pending, prompt, completion = [], 0, 0
        pending.append(sequence)
        prompt, completion = max(prompt, p), max(completion, t)
    if pending:
        yield MicroBatch.collate(pending, pad_id, device)
