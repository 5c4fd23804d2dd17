"""Scored groups and the sequences they are trained as. G groups of n samples are N = G * n sequences."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import torch

from dvp_rl.contract.group import FinishReason, Group, Sample

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


@dataclass(frozen=True)
class ScoredGroup:
    """A group and the rewards of its samples."""

    group: Group
    rewards: tuple[float, ...]
    """[n] rewards from which advantages are computed: after overlong shaping."""
    staleness: int
    """Number of batches that changed the weights since the oldest span of its samples was drawn."""
    num_failed: int = 0
    """Number of samples whose reward function failed."""
    reward_s: float = 0.0
    arrived: float = 0.0
    """time.monotonic() when the trainer received the group."""

    @property
    def has_signal(self) -> bool:
        """False if two or more samples all have the same reward: every advantage, and so the gradient, is then zero."""
        return len(self.rewards) == 1 or min(self.rewards) < max(self.rewards)


@dataclass(frozen=True)
class TrainSequence:
    """A sample with its prompt; row `index` of the batch's [N] vectors."""

    index: int
    prompt_ids: np.ndarray
    sample: Sample

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.sample.token_ids)


@dataclass(frozen=True)
class Batch:
    """Groups that are trained together, in one or more optimizer steps."""

    groups: tuple[ScoredGroup, ...]
    offset: int = 0
    """Row index of the first sequence."""

    @property
    def rewards(self) -> Float[Tensor, "G n"]:
        return torch.tensor([scored.rewards for scored in self.groups], dtype=torch.float64)

    @property
    def metadata(self) -> list[dict[str, Any]]:
        """Metadata of each group's job."""
        return [scored.group.metadata for scored in self.groups]

    @property
    def num_sequences(self) -> int:
        return sum(len(scored.rewards) for scored in self.groups)

    @property
    def num_tokens(self) -> int:
        """Number of model tokens in all groups."""
        return sum(scored.group.num_tokens for scored in self.groups)

    def to_bytes(self) -> bytes:
        """Encodes groups, rewards and staleness for the other ranks of a world."""
        encoded: bytes = msgpack.packb(
            [[scored.group.to_bytes(), scored.rewards, scored.staleness] for scored in self.groups]
        )
        return encoded

    @classmethod
    def from_bytes(cls, data: bytes) -> Batch:
        groups = msgpack.unpackb(data)
        return cls(tuple(ScoredGroup(Group.from_bytes(g), tuple(rewards), stale) for g, rewards, stale in groups))

    def sequences(self, *, without_signal: bool = False) -> list[TrainSequence]:
        """All sequences in order. Groups without signal are left out, so that they cost no forward and no backward,
        unless `without_signal` is set."""
        found, index = [], self.offset
        for scored in self.groups:
            samples = enumerate(scored.group.samples, start=index)
            if scored.has_signal or without_signal:
                found += [TrainSequence(i, scored.group.prompt_ids, sample) for i, sample in samples]
            index += len(scored.rewards)
        return found

    def split(self, parts: int) -> list[Batch]:
        """`parts` mini-batches of whole groups, as equal in size as possible; row indices remain those of the whole
        batch. Requires at least as many groups as parts."""
        n = len(self.groups[0].rewards)
        bounds = [len(self.groups) * part // parts for part in range(parts + 1)]
        return [Batch(self.groups[start:end], self.offset + start * n) for start, end in pairwise(bounds)]

    def complete(self) -> Bool[Tensor, "G n"]:
        """True for samples that stopped on their own, not at max_tokens."""
        stopped = [[s.finish_reason is FinishReason.STOP for s in scored.group.samples] for scored in self.groups]
        return torch.tensor(stopped)
