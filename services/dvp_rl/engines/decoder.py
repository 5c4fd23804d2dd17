"""Sources of a batch's logits: a key-value cache here, token ids alone in fixed_shape.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from .batch import Batch
from .commands import Prefill, Submission
from .kv_cache import RowCache

if TYPE_CHECKING:
    from numpy.typing import NDArray

PREFILL_TOKENS = 8192
"""Maximum number of prompt tokens per forward; a longer prompt runs alone."""


class Placement(NamedTuple):
    submission: Submission
    num_rows: int


class Decoder(Protocol):
    """Runs the model for the batch; used by the worker's thread alone."""

    def begin(self, batch: Batch, placements: Sequence[Placement]) -> Tensor:
        """Logits [rows, V] for the first tokens of the rows just placed, which are the last rows of the batch."""

    def step(self, batch: Batch) -> Tensor:
        """Logits [n, V] for the next token of every row."""

    def move(self, batch: Batch, source: list[int], target: list[int]) -> None:
        """Follows the batch, whose rows `source` have moved to `target`."""

    def recompute(self, batch: Batch) -> None:
        """Rebuilds all state after the weights changed."""

    def clear(self) -> None:
        """Drops all state once no row is left."""


class CachedDecoder:
    """Runs one prefill per job, then one position per row and step."""

    def __init__(self, model: Any) -> None:
        self._model, self._device = model, model.device
        self._cache = RowCache()

    def begin(self, batch: Batch, placements: Sequence[Placement]) -> Tensor:
        self._prefill(submission for submission, _ in placements if submission.prefill is None)
        start, logits = len(batch) - sum(count for _, count in placements), []
        for submission, count in placements:
            prefill = submission.prefill
            assert prefill is not None
            self._cache.fill(start, prefill.cache, torch.full((count,), prefill.index, device=self._device))
            logits.append(prefill.logits.expand(count, -1))
            start += count
            if not submission.unplaced:
                submission.prefill = None
        return torch.cat(logits)

    def step(self, batch: Batch) -> Tensor:
        lengths = batch.lengths
        count, span = len(lengths), int(lengths.max()) + 1
        positions = torch.from_numpy(lengths).to(self._device)
        self._cache.reserve(count, span)
        self._cache.aim(positions, span)
        out = self._model(
            input_ids=batch.inputs,
            position_ids=positions[:, None],
            attention_mask=self._mask(lengths, positions, span),
            past_key_values=self._cache,
            use_cache=True,
        )
        logits: Tensor = out.logits[:, -1]
        return logits

    def move(self, batch: Batch, source: list[int], target: list[int]) -> None:
        length = int(batch.lengths[target].max())
        self._cache.move(torch.tensor(source, device=self._device), torch.tensor(target, device=self._device), length)

    def recompute(self, batch: Batch) -> None:
        """Rebuilds the cache from token ids, one block of rows at a time, padded on the right."""
        if not len(batch):
            return
        longest = int(batch.lengths.max())
        size = max(1, PREFILL_TOKENS // longest)
        for start in range(0, len(batch), size):
            rows = range(start, min(start + size, len(batch)))
            _, cache = self._read(batch.history(rows, longest))
            self._cache.fill(start, cache, torch.arange(len(rows), device=self._device))

    def clear(self) -> None:
        self._cache.clear()

    def _prefill(self, submissions: Iterable[Submission]) -> None:
        """Prefills prompts of equal length together, at most PREFILL_TOKENS tokens per forward."""
        by_length = sorted(submissions, key=lambda s: len(s.job.prompt_ids))
        for length, group in groupby(by_length, key=lambda s: len(s.job.prompt_ids)):
            same = list(group)
            size = max(1, PREFILL_TOKENS // length)
            for part in (same[i : i + size] for i in range(0, len(same), size)):
                prompts = np.stack([submission.job.prompt_ids for submission in part])
                logits, cache = self._read(torch.from_numpy(prompts.astype(np.int64)))
                for index, submission in enumerate(part):
                    submission.prefill = Prefill(cache, index, logits[index : index + 1])

    def _read(self, token_ids: Tensor) -> tuple[Tensor, DynamicCache]:
        """Runs a forward over whole rows [rows, length]; returns the last logits [rows, V] and the filled cache."""
        cache = DynamicCache()
        positions = torch.arange(token_ids.shape[1], device=self._device).expand(token_ids.shape)
        out = self._model(
            input_ids=token_ids.to(self._device),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1], cache

    def _mask(self, lengths: NDArray[np.int64], positions: Tensor, span: int) -> Tensor | None:
        """Additive attention mask [n, 1, 1, span]; None if all rows have the same length."""
        if lengths.min() == lengths.max():
            return None
        beyond = torch.arange(span, device=self._device) > positions[:, None]
        zeros = torch.zeros(beyond.shape, dtype=self._model.dtype, device=self._device)
        return zeros.masked_fill_(beyond, float("-inf"))[:, None, None]
