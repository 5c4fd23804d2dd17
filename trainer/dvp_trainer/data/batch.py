"""Scored groups, and the sequences they are trained as. G groups of n samples are N = G * n sequences."""

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
    """A group and what its samples are worth."""

    group: Group
    rewards: tuple[float, ...]
    """[n] as the advantages see them: after overlong shaping."""
    staleness: int
    """Batches that changed the weights since the oldest span of its samples."""
    num_failed: int = 0
    """Samples whose reward function failed."""
    reward_s: float = 0.0
    arrived: float = 0.0
    """time.monotonic() when the trainer got the group."""

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
    """What is trained at once, in one optimizer step or more."""

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
        """So many mini-batches of whole groups, as equal as can be; row indices stay those of the whole batch. There
        must be at least as many groups as parts."""
        n = len(self.groups[0].rewards)
        bounds = [len(self.groups) * part // parts for part in range(parts + 1)]
        return [Batch(self.groups[start:end], self.offset + start * n) for start, end in pairwise(bounds)]

    def complete(self) -> Bool[Tensor, "G n"]:
        """Samples that ended by themselves, not by max_tokens."""
        stopped = [[s.finish_reason is FinishReason.STOP for s in scored.group.samples] for scored in self.groups]
        return torch.tensor(stopped)
