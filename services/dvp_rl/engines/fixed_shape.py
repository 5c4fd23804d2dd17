"""Zero mismatch: engine and trainer run every forward in one shape and get identical bits (VeXact, arXiv 2605.14220).

A float32 sum depends on the order of its terms, the order depends on the kernel, and the kernel is chosen by shape. In
a forward of [rows, length] token ids, padded at the end and without a cache, a hidden state depends only on the tokens
up to it in its own row: not on other rows, later tokens or gradient mode. The LM head processes `rows` states at a
time. Log-probs of both sides are then equal, given the same weights, dtype, number of threads, machine and PyTorch
version, and each source of mismatch can be switched on separately. On a GPU, sums over the vocabulary are in float64:
there, the order of the terms depends on how many rows are summed.

This costs a whole forward per token, so it is for diagnosis, not for speed. Shapes: R rows, L length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dvp_rl.contract.errors import ConfigError
from dvp_rl.contract.shape import Shape

from .batch import Batch
from .context import text_config
from .decoder import Placement
from .model_folder import has_linear_head
from .protocol import PromptTokens
from .reference import gap, some_tokens, states, states_alone, tolerance

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class FixedDecoder:
    """Keeps no state: computes every token from token ids."""

    def __init__(self, model: Any, shape: Shape) -> None:
        check_fixed_shape(model, shape, model.dtype)
        self._model, self._shape = model, shape
        self.prompt_tokens = PromptTokens()

    def begin(self, batch: Batch, placements: Sequence[Placement]) -> Tensor:
        num_read = sum(placed.num_rows * len(placed.submission.job.prompt_ids) for placed in placements)
        self.prompt_tokens = self.prompt_tokens.plus(PromptTokens(read=num_read))
        return self._logits(batch, len(batch) - sum(placed.num_rows for placed in placements))

    def step(self, batch: Batch) -> Tensor:
        return self._logits(batch, 0)

    def finish(self, batch: Batch, rows: list[int]) -> None:
        pass

    def move(self, batch: Batch, source: list[int], target: list[int]) -> None:
        pass

    def recompute(self, batch: Batch) -> None:
        pass

    def clear(self) -> None:
        pass

    def _logits(self, batch: Batch, first: int) -> Tensor:
        """Logits [n - first, V] of the rows from `first` on."""
        newest = torch.from_numpy(batch.prompts + batch.generated - 1).to(batch.device)
        rows = range(first, len(batch))
        blocks = (rows[i : i + self._shape.rows] for i in range(0, len(rows), self._shape.rows))
        return torch.cat([self._block(batch, block, newest[list(block)]) for block in blocks])

    def _block(self, batch: Batch, rows: range, newest: Tensor) -> Tensor:
        token_ids = whole_blocks(batch.history(rows, self._shape.length), self._shape.rows)
        states = self._model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
        last = states[torch.arange(len(states), device=states.device), whole_blocks(newest, len(states))]
        return summable(self._model.get_output_embeddings()(last))[: len(rows)]


def summable(logits: Tensor) -> Tensor:
    """Logits whose sums do not depend on the number of rows, once they are rounded to float32.

    On a GPU, PyTorch's sums do: on an H200, some log-probs of 1 or 8 rows differed in the last bit from those of many.
    """
    return logits if logits.device.type == "cpu" else logits.double()


def whole_blocks(values: Tensor, rows: int) -> Tensor:
    """`values` zero-padded at the end to a multiple of `rows`."""
    return pad(values, (0, 0) * (values.dim() - 1) + (0, -len(values) % rows))


def check_fixed_shape(model: Any, shape: Shape, dtype: torch.dtype) -> None:
    """Raises ConfigError unless the model, which computes in `dtype`, has the above properties on this machine."""
    context = getattr(text_config(model.config), "max_position_embeddings", shape.length)
    if shape.length > context:
        raise ConfigError(f"fixed_shape {shape}: the model's context is {context} tokens")
    if not has_linear_head(model):
        raise ConfigError(
            f"fixed_shape {shape}: the logits of model type {model.config.model_type} are not the product of LM head "
            "and hidden state alone, so the two sides cannot share them"
        )
    row = some_tokens(model, shape.length)
    with torch.no_grad():
        found = gap(states(model, {"input_ids": whole_blocks(row[None], shape.rows)})[0], states_alone(model, row))
    if not found <= tolerance(dtype):
        raise ConfigError(
            f"fixed_shape {shape}: hidden states of model type {model.config.model_type} would differ by {found:.2g} "
            "standard deviations from those of the same sequence run alone"
        )
    half = max(1, shape.length // 2)
    vocab_size = text_config(model.config).vocab_size
    token_ids = torch.arange(shape.rows * shape.length, device=model.device).remainder(vocab_size).view(shape)
    other = token_ids.flip(0)
    other[:, half:] = 0
    with torch.no_grad():
        first = _states_and_logits(model, token_ids, half)
    second = _states_and_logits(model, other, half)
    for what, here, there in zip(("hidden states", "logits"), first, second, strict=True):
        if not torch.equal(here, there.flip(0)):
            raise ConfigError(
                f"fixed_shape {shape}: on this machine a token's {what} depend on its row's position or on later "
                f"tokens, by up to {float((here - there.flip(0)).abs().max()):.1g}; try one row, or another length"
            )


def _states_and_logits(
    model: Any, token_ids: Int[Tensor, "R L"], half: int
) -> tuple[Float[Tensor, "R half hidden"], Float[Tensor, "R vocab"]]:
    states = model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state[:, :half]
    return states.detach(), model.get_output_embeddings()(states[:, -1]).detach()
