"""Keys and values of finished prompts and answers. The next turn of a conversation continues them, and reads only what
is new.

Shapes: K key-value heads, P positions, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEAST_TOKENS = 64
"""Shorter prefixes are neither kept nor continued: short prompts cost less if several are read together."""
MOST_PREFIXES = 1024
"""A prompt is compared with each of them in turn."""


@dataclass(frozen=True, eq=False)
class Prefix:
    """Tokens that the model has read, with what it keeps of them."""

    token_ids: NDArray[np.int32]
    """[P]"""
    layers: list[tuple[Tensor, Tensor]]
    """Keys and values of each layer, [K, P, D]."""

    @cached_property
    def num_bytes(self) -> int:
        return sum(cells.numel() * cells.element_size() for layer in self.layers for cells in layer)

    def copy(self) -> Prefix:
        return Prefix(self.token_ids, [(keys.clone(), values.clone()) for keys, values in self.layers])


class Beginning(NamedTuple):
    """The first `length` tokens of a prefix."""

    prefix: Prefix
    length: int


class PrefixCache:
    """The prefixes used last, at most MOST_PREFIXES of `max_bytes` together. All are of the same weights: `clear` it
    when these change."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._prefixes: list[Prefix] = []
        """The one used last is at the end."""

    def __len__(self) -> int:
        return len(self._prefixes)

    def find(self, prompt_ids: NDArray[np.int32]) -> Beginning | None:
        """The longest beginning of the prompt that is known, if that is half of it: what is new is read more slowly
        after it. The prompt's last token never belongs to it, because what follows is drawn from that token's logits,
        which are not kept."""
        read, length, found = prompt_ids[:-1], 0, None
        for prefix in reversed(self._prefixes):
            if (shared := num_shared(prefix.token_ids, read)) > length:
                length, found = shared, prefix
        if found is None or length < max(LEAST_TOKENS, len(prompt_ids) / 2):
            return None
        self._use(found)
        return Beginning(found, length)

    def keep(self, prefix: Prefix) -> None:
        """Keeps a copy instead of those that it continues, and forgets the ones used longest ago where there is no
        room."""
        if len(prefix.token_ids) < LEAST_TOKENS or prefix.num_bytes > self.max_bytes:
            return
        for known in [*self._prefixes]:
            shared = num_shared(known.token_ids, prefix.token_ids)
            if shared == len(prefix.token_ids):
                self._use(known)
                return
            if shared == len(known.token_ids):
                self._forget(known)
        while len(self) == MOST_PREFIXES or self.num_bytes + prefix.num_bytes > self.max_bytes:
            self._forget(self._prefixes[0])
        self._prefixes.append(prefix.copy())
        self.num_bytes += prefix.num_bytes

    def clear(self) -> None:
        self._prefixes.clear()
        self.num_bytes = 0

    def _use(self, prefix: Prefix) -> None:
        self._prefixes.remove(prefix)
        self._prefixes.append(prefix)

    def _forget(self, prefix: Prefix) -> None:
        self._prefixes.remove(prefix)
        self.num_bytes -= prefix.num_bytes


def num_shared(first: NDArray[np.int32], second: NDArray[np.int32]) -> int:
    """Number of tokens with which both begin."""
    length = min(len(first), len(second))
    differ = np.flatnonzero(first[:length] != second[:length])
    return int(differ[0]) if len(differ) else length
