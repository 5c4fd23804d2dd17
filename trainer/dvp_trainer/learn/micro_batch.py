"""Micro-batches: tensors of episodes that fit into memory together.

Shapes: a micro-batch has b episodes; T is the largest number of model tokens in one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dvp_rl.contract.errors import ConfigError
from dvp_rl.contract.shape import Shape
from dvp_rl.dvp.policy import Constrained
from dvp_trainer.data.batch import Episode

from .arrangement import Beside, lay_out
from .layout import Layout, Tokens, fixed

if TYPE_CHECKING:
    from jaxtyping import Bool, Int, Shaped
    from torch import Tensor


@dataclass(frozen=True)
class MicroBatch:
    """Some episodes, one per row: the model tokens of an episode's samples side by side. The environment's tokens are
    only in the layouts."""

    rows: Int[Tensor, " b"]
    """Index of each episode in the batch's [N] vectors."""
    layouts: tuple[Layout, ...]
    """What each forward reads. There are several only if the samples of a single episode exceed the limit."""
    token_ids: Int[Tensor, "b T"]
    """Model tokens; 0 where padded."""
    mask: Bool[Tensor, "b T"]
    """True on model tokens."""
    infer: Constrained
    """[b, T] fields from the engine. Padding has log-prob 0, kept mass 1, kept count 1 and is inside."""

    @classmethod
    def collate(
        cls, episodes: Sequence[Episode], parts: Sequence[Sequence[Tokens]], layouts: Sequence[Layout]
    ) -> MicroBatch:
        """`parts`: the tokens of each episode's samples, which the layouts hold."""
        device = layouts[0].input_ids.device
        shape = len(episodes), max(sum(sample.num_model_tokens for sample in e.samples) for e in episodes)
        token_ids, mask = np.zeros(shape, np.int64), np.zeros(shape, bool)
        logprobs, mass, count = np.zeros(shape, np.float32), np.ones(shape, np.float32), np.ones(shape, np.int64)
        for row, (episode, part) in enumerate(zip(episodes, parts, strict=True)):
            start = 0
            for sample, tokens in zip(episode.samples, part, strict=True):
                cells = row, slice(start, start := start + sample.num_model_tokens)
                token_ids[cells], mask[cells] = tokens.completion[tokens.is_model], True
                logprobs[cells], mass[cells], count[cells] = sample.logprobs, sample.kept_mass, sample.kept_count
        rows = np.array([episode.index for episode in episodes])

        def tensor(array: npt.NDArray[Any]) -> Tensor:
            return torch.from_numpy(array).to(device)

        infer = Constrained(tensor(logprobs), tensor(mass), tensor(count), tensor(np.ones(shape, bool)))
        return cls(tensor(rows), tuple(layouts), tensor(token_ids), tensor(mask), infer)

    def forwards(self) -> list[tuple[Layout, Int[Tensor, " tokens"]]]:
        """What each forward reads, and the model tokens that it predicts."""
        return list(zip(self.layouts, self.per_forward(self.token_ids), strict=True))

    def per_forward(self, values: Shaped[Tensor, "b T"]) -> list[Shaped[Tensor, " tokens"]]:
        """The entries of the model tokens that each forward predicts."""
        numbers = [len(layout.before) for layout in self.layouts]
        return list(values[self.mask].split(numbers))  # type: ignore[no-untyped-call]

    def idle(self) -> MicroBatch:
        """The same micro-batch without model tokens: forward and backward run but contribute nothing."""
        return replace(self, mask=torch.zeros_like(self.mask), layouts=(self.layouts[0].idle(),))

    def in_forwards(self, count: int) -> MicroBatch:
        """The same micro-batch in `count` forwards, of which those beyond its own contribute nothing."""
        return replace(self, layouts=self.layouts + (self.layouts[0].idle(),) * (count - len(self.layouts)))


@dataclass(frozen=True)
class Limit:
    """Which sequences a forward may read together."""

    beside: Beside
    max_tokens: int
    """Padding counts if there is any. A prompt counts once per sample, as it does in the memory that attention
    takes."""
    shape: Shape | None = None
    """Fixed shape of every forward, which then is the only limit."""
    longest: int | None = None
    """Longest sequence that does not change the model's RoPE, for all others in the forward too; None: any length."""

    def allows(self, size: Size) -> bool:
        if self.shape is not None:
            return size.sequences <= self.shape.rows
        match self.beside:
            case Beside.PACKED:
                return size.tokens <= self.max_tokens
            case Beside.PADDED:
                return size.sequences * (size.prompt + size.completion) <= self.max_tokens
            case Beside.ALONE:
                return size.sequences == 1


class Size(NamedTuple):
    """The size of some sequences."""

    sequences: int
    tokens: int
    prompt: int
    """Length of the longest prompt."""
    completion: int
    """Length of the longest completion."""

    @classmethod
    def of(cls, sequences: Sequence[Tokens]) -> Size:
        lengths = [(len(tokens.prompt), len(tokens.completion)) for tokens in sequences]
        prompts, completions = zip(*lengths, strict=True)
        return cls(len(sequences), sum(prompts) + sum(completions), max(prompts), max(completions))

    def beside(self, other: Size) -> Size:
        longest = max(self.prompt, other.prompt), max(self.completion, other.completion)
        return Size(self.sequences + other.sequences, self.tokens + other.tokens, *longest)


def micro_batches(
    episodes: Sequence[Episode], limit: Limit, *, pad_id: int, device: torch.device
) -> Iterator[MicroBatch]:
    """Micro-batches of whole episodes in the given order, cut by `cut`, as are the forwards of an episode that is
    larger than the limit. Raises ConfigError if a sequence is longer than `limit.longest`, or than a fixed shape."""
    parts = [tokens_of(episode) for episode in episodes]
    for prompt, completion, _ in chain.from_iterable(parts):
        p, t = len(prompt), len(completion)
        if limit.longest is not None and p + t > limit.longest:
            raise ConfigError(
                f"got a sequence of {p} + {t} tokens, its environment's included: the model's RoPE changes in those of "
                f"more than {limit.longest}, and engine and trainer would not agree"
            )
    for some in cut(parts, limit):
        sequences = [tokens for part in parts[some] for tokens in part]
        layouts = lay_out_all(sequences, limit, pad_id=pad_id, device=device)
        yield MicroBatch.collate(episodes[some], parts[some], layouts)


def lay_out_all(sequences: list[Tokens], limit: Limit, *, pad_id: int, device: torch.device) -> list[Layout]:
    """One layout for each forward that reads some of the sequences."""
    forwards = [sequences[few] for few in cut([[tokens] for tokens in sequences], limit)]
    if limit.shape is None:
        return [lay_out(limit.beside, few, pad_id, device) for few in forwards]
    return [fixed(few, limit.shape, device) for few in forwards]


def tokens_of(episode: Episode) -> list[Tokens]:
    """What the model reads of each sample."""
    pairs = zip(episode.prompts, episode.samples, strict=True)
    return [Tokens(prompt, sample.token_ids, sample.is_model) for prompt, sample in pairs]


def cut(parts: Sequence[Sequence[Tokens]], limit: Limit) -> Iterator[slice]:
    """Stretches of parts, as long as the limit allows but of at least one part. No part is divided."""
    start, total = 0, None
    for stop, part in enumerate(parts):
        size = Size.of(part)
        more = size if total is None else total.beside(size)
        if stop > start and not limit.allows(more):
            yield slice(start, stop)
            start, more = stop, size
        total = more
    if parts:
        yield slice(start, len(parts))


def share(episodes: Sequence[Episode], rank: int, size: int) -> list[Episode]:
    """The part for `rank`: one of `size` contiguous stretches with about equal numbers of tokens."""
    lengths = np.array([episode.num_tokens for episode in episodes])
    middle = lengths.cumsum() - lengths / 2
    return [e for e, part in zip(episodes, middle * size // max(lengths.sum(), 1), strict=True) if part == rank]
