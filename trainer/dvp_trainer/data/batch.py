"""Scored groups and the episodes they are trained as. G groups of n episodes are the N = G * n rows of a batch."""

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
    """A group and the rewards of its episodes."""

    group: Group
    rewards: tuple[float, ...]
    """[n] rewards from which advantages are computed: after overlong shaping."""
    staleness: int
    """Number of batches that changed the weights since the oldest span of its samples was drawn."""
    num_failed: int = 0
    """Number of episodes whose reward function failed."""
    reward_s: float = 0.0
    arrived: float = 0.0
    """time.monotonic() when the trainer received the group."""

    @property
    def has_signal(self) -> bool:
        """False if two or more episodes all have the same reward: every advantage, and so the gradient, is zero."""
        return len(self.rewards) == 1 or min(self.rewards) < max(self.rewards)


@dataclass(frozen=True)
class Episode:
    """The samples of an episode: row `index` of the batch's [N] vectors, whatever their number."""

    index: int
    prompt_ids: np.ndarray
    """The group's prompt."""
    samples: tuple[Sample, ...]

    @property
    def prompts(self) -> list[np.ndarray]:
        """What precedes each sample."""
        return [sample.continues(self.prompt_ids) for sample in self.samples]

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the model reads, prompts included."""
        return sum(map(len, self.prompts)) + sum(len(sample.token_ids) for sample in self.samples)


@dataclass(frozen=True)
class Batch:
    """Groups that are trained together, in one or more optimizer steps."""

    groups: tuple[ScoredGroup, ...]
    offset: int = 0
    """Row index of the first episode."""

    @property
    def rewards(self) -> Float[Tensor, "G n"]:
        return torch.tensor([scored.rewards for scored in self.groups], dtype=torch.float64)

    @property
    def metadata(self) -> list[dict[str, Any]]:
        """Metadata of each group's job."""
        return [scored.group.metadata for scored in self.groups]

    @property
    def num_episodes(self) -> int:
        return sum(len(scored.rewards) for scored in self.groups)

    @property
    def num_model_tokens(self) -> int:
        return sum(scored.group.num_model_tokens for scored in self.groups)

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

    def episodes(self, *, without_signal: bool = False) -> list[Episode]:
        """All episodes in order. Groups without signal are left out, so that they cost no forward and no backward,
        unless `without_signal` is set."""
        found, index = [], self.offset
        for scored in self.groups:
            numbered = enumerate(scored.group.episodes, start=index)
            if scored.has_signal or without_signal:
                found += [Episode(i, scored.group.prompt_ids, samples) for i, samples in numbered]
            index += len(scored.rewards)
        return found

    def split(self, parts: int) -> list[Batch]:
        """`parts` mini-batches of whole groups, as equal in size as possible; row indices remain those of the whole
        batch. Requires at least as many groups as parts."""
        n = len(self.groups[0].rewards)
        bounds = [len(self.groups) * part // parts for part in range(parts + 1)]
        return [Batch(self.groups[start:end], self.offset + start * n) for start, end in pairwise(bounds)]

    def complete(self) -> Bool[Tensor, "G n"]:
        """True for episodes whose last sample stopped on its own, not at max_tokens."""
        return torch.tensor(
            [[last.finish_reason is FinishReason.STOP for *_, last in scored.group.episodes] for scored in self.groups]
        )
