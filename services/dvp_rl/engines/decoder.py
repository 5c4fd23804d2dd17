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
from .kv_cache import RowCache, causal_mask, read
from .prefix_cache import Beginning, Prefix, PrefixCache
from .protocol import PromptTokens

if TYPE_CHECKING:
    from numpy.typing import NDArray

PREFILL_TOKENS = 8192
"""Maximum number of prompt tokens per forward; a longer prompt runs alone."""
CONTINUED_TOKENS = 512
"""The same for what continues a prompt, whose attention mask [tokens, positions] takes memory."""


class Placement(NamedTuple):
    submission: Submission
    num_rows: int


class Decoder(Protocol):
    """Runs the model for the batch; used by the worker's thread alone."""

    prompt_tokens: PromptTokens
    """So far; may be read by any thread."""

    def begin(self, batch: Batch, placements: Sequence[Placement]) -> Tensor:
        """Logits [rows, V] for the first tokens of the rows just placed, which are the last rows of the batch."""

    def step(self, batch: Batch) -> Tensor:
        """Logits [n, V] for the next token of every row."""

    def finish(self, batch: Batch, rows: list[int]) -> None:
        """These rows have ended well, their samples are sent, and they are about to leave."""

    def move(self, batch: Batch, source: list[int], target: list[int]) -> None:
        """Follows the batch, whose rows `source` have moved to `target`."""

    def recompute(self, batch: Batch) -> None:
        """Rebuilds all state after the weights changed."""

    def clear(self) -> None:
        """Drops all state once no row is left."""


class CachedDecoder:
    """Runs one prefill per job, then one position per row and step. A prompt that continues what was read and drawn for
    a job of one sample is read from there on."""

    def __init__(self, model: Any, prefix_bytes: int = 0) -> None:
        """`prefix_bytes`: memory for what prompts may continue."""
        self._model, self._device = model, model.device
        self._cache = RowCache()
        self._prefixes = PrefixCache(prefix_bytes)
        self.prompt_tokens = PromptTokens()

    def begin(self, batch: Batch, placements: Sequence[Placement]) -> Tensor:
        num_read = self._prefill(submission for submission, _ in placements if submission.prefill is None)
        num_tokens = sum(count * len(submission.job.prompt_ids) for submission, count in placements)
        self.prompt_tokens = self.prompt_tokens.plus(PromptTokens(num_read, num_tokens - num_read))
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

    def finish(self, batch: Batch, rows: list[int]) -> None:
        lengths = batch.lengths
        for row in rows:
            job, length = batch.rows[row].job, int(lengths[row])
            if job.n == 1 and self._prefixes.max_bytes:
                token_ids = np.append(job.prompt_ids, batch.token_ids(row))[:length].astype(np.int32)
                self._prefixes.keep(Prefix(token_ids, self._cache.row(row, length)))

    def move(self, batch: Batch, source: list[int], target: list[int]) -> None:
        length = int(batch.lengths[target].max())
        self._cache.move(torch.tensor(source, device=self._device), torch.tensor(target, device=self._device), length)

    def recompute(self, batch: Batch) -> None:
        """Rebuilds the cache from token ids, one block of rows at a time, padded on the right."""
        self._prefixes.clear()
        if not len(batch):
            return
        longest = int(batch.lengths.max())
        size = max(1, PREFILL_TOKENS // longest)
        for start in range(0, len(batch), size):
            rows = range(start, min(start + size, len(batch)))
            _, cache = read(self._model, batch.history(rows, longest))
            self._cache.fill(start, cache, torch.arange(len(rows), device=self._device))

    def clear(self) -> None:
        self._cache.clear()
        self._prefixes.clear()

    def _prefill(self, submissions: Iterable[Submission]) -> int:
        """Prefills prompts of equal length together, at most PREFILL_TOKENS tokens per forward, and those that continue
        others one by one. Returns the number of tokens read."""
        new, num_read = [], 0
        for submission in submissions:
            prompt_ids = submission.job.prompt_ids
            begun = self._prefixes.find(prompt_ids)
            num_read += len(prompt_ids) - (begun.length if begun else 0)
            if begun:
                submission.prefill = self._continue(begun, prompt_ids)
            else:
                new.append(submission)
        by_length = sorted(new, key=lambda s: len(s.job.prompt_ids))
        for length, group in groupby(by_length, key=lambda s: len(s.job.prompt_ids)):
            same = list(group)
            size = max(1, PREFILL_TOKENS // length)
            for part in (same[i : i + size] for i in range(0, len(same), size)):
                prompts = np.stack([submission.job.prompt_ids for submission in part])
                logits, cache = read(self._model, torch.from_numpy(prompts.astype(np.int64)))
                for index, submission in enumerate(part):
                    submission.prefill = Prefill(cache, index, logits[index : index + 1])
        return num_read

    def _continue(self, begun: Beginning, prompt_ids: NDArray[np.int32]) -> Prefill:
        cache, length = DynamicCache(), begun.length
        for number, cells in enumerate(begun.prefix.layers):
            cache.update(*(part[None, :, :length] for part in cells), number)
        new = torch.from_numpy(prompt_ids.astype(np.int64))[None, length:]
        for start in range(0, new.shape[1], CONTINUED_TOKENS):
            logits, cache = read(self._model, new[:, start : start + CONTINUED_TOKENS], cache)
        return Prefill(cache, 0, logits)

    def _mask(self, lengths: NDArray[np.int64], positions: Tensor, span: int) -> Tensor | None:
        """Additive attention mask [n, 1, 1, span]; None if all rows have the same length."""
        if lengths.min() == lengths.max():
            return None
        return causal_mask(positions[:, None, None], span, self._model.dtype)
