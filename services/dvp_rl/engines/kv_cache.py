"""Keys and values of the rows decoded together, and the attention that reads them.

Shapes: R rows, H query heads, K key-value heads, L positions, D head dimension; H = K * G.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from dvp_rl.contract.errors import ConfigError

ATTENTION = "dvp_rows"
"""Name under which `attend_rows` is registered with Transformers."""

LENGTH_STEP = 64
UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Keyword arguments with which some architectures change attention itself."""


class RowLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's cache, [R, K, L, D], written in place. Only its first rows and positions are in use.

    Every cell is finite unless the logits of its own row are not. A masked cell has weight zero, but 0 * NaN would
    still corrupt the samples that later take over the row.
    """

    is_sliding = False

    def __init__(self, like_keys: Tensor, like_values: Tensor) -> None:
        super().__init__()
        self.keys = like_keys.new_zeros((0, like_keys.shape[1], 0, like_keys.shape[3]))
        self.values = like_values.new_zeros((0, like_values.shape[1], 0, like_values.shape[3]))
        self.is_initialized = True
        self.cells = torch.zeros(0, dtype=torch.long)
        self.span = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the constructor knows the shapes."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes one new position per row where `RowCache.aim` points; returns the keys and values to attend to."""
        for cells, new in ((self.keys, key_states), (self.values, value_states)):
            cells.view(-1, cells.shape[3]).index_copy_(0, self.cells, new.reshape(-1, cells.shape[3]))
        count = len(key_states)
        return self.keys[:count, :, : self.span], self.values[:count, :, : self.span]

    def get_seq_length(self) -> int:
        return self.span

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.span, 0

    def get_max_length(self) -> int:
        return -1

    def reserve(self, rows: int, length: int) -> None:
        self.keys, self.values = _grown(self.keys, rows, length), _grown(self.values, rows, length)


class RowCache(Cache):  # type: ignore[misc]
    """Compact rows 0..n-1 over all layers. Grows geometrically, so that decode steps rarely copy it."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.layers: list[RowLayer]
        self._capacity = (0, 0)

    def clear(self) -> None:
        self.layers, self._capacity = [], (0, 0)

    def reserve(self, rows: int, length: int) -> None:
        """Makes room for `rows` rows of `length` positions."""
        have_rows, have_length = self._capacity
        if rows <= have_rows and length <= have_length:
            return
        if rows > have_rows:
            have_rows = max(rows, 2 * have_rows)
        if length > have_length:
            have_length = -(-max(length, 3 * have_length // 2) // LENGTH_STEP) * LENGTH_STEP
        for layer in self.layers:
            layer.reserve(have_rows, have_length)
        self._capacity = have_rows, have_length

    def fill(self, start: int, prompts: Cache, index: Tensor) -> None:
        """Copies the prompts `index` of a filled cache [prompts, K, L, D] into rows start, start + 1, ..."""
        if not self.layers:
            self.layers = [RowLayer(layer.keys, layer.values) for layer in prompts.layers]
            self._capacity = (0, 0)
        stop, length = start + len(index), prompts.get_seq_length()
        self.reserve(stop, length)
        for mine, theirs in zip(self.layers, prompts.layers, strict=True):
            for target, source in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
                target[start:stop, :, :length] = source[index]
                target[start:stop, :, length:] = 0

    def row(self, row: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """Views of the first `length` positions of a row: keys and values [K, length, D] of each layer."""
        return [(layer.keys[row, :, :length], layer.values[row, :, :length]) for layer in self.layers]

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copies rows `source`, which are at most `length` long, over rows `target`."""
        for layer in self.layers:
            for cells in (layer.keys, layer.values):
                cells[target, :, :length] = cells[source, :, :length]
                cells[target, :, length:] = 0

    def aim(self, positions: Tensor, span: int) -> None:
        """Makes the next forward write row i at positions[i] and read the first `span` positions of every row."""
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        cells: dict[int, Tensor] = {}
        for layer in self.layers:
            heads = layer.keys.shape[1]
            if heads not in cells:
                lines = rows * heads + torch.arange(heads, device=positions.device)
                cells[heads] = (lines * self._capacity[1] + positions[:, None]).view(-1)
            layer.cells, layer.span = cells[heads], span


def attend_rows(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of whole prompts (no mask needed), of what is new of a prompt, or of one new token per row, over
    the cache.

    In a decode step the G query heads of one key-value head are folded into the query axis, so keys and values are read
    in place instead of repeated G times: [R, K, G, D] x [R, K, L, D]. The CPU's bfloat16 kernel does this itself, 1.4x
    faster; the CUDA kernels cannot do it with a mask.
    """
    if found := [name for name in UNSUPPORTED if kwargs.get(name) is not None]:
        raise ConfigError(f"this model's attention needs {found[0]}; use the sglang engine for it")
    R, H, Q, _ = query.shape
    K, D = key.shape[1], value.shape[3]
    if Q > 1:
        which = {"is_causal": True} if attention_mask is None else {"attn_mask": attention_mask}
        out = scaled_dot_product_attention(query, key, value, **which, scale=scaling, enable_gqa=H != K)
        return out.transpose(1, 2).contiguous(), None
    if query.dtype == torch.bfloat16 and query.device.type == "cpu":
        gqa = H != K
        out = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=gqa)
        return out.view(R, 1, H, D), None
    grouped = query.view(R, K, H // K, query.shape[3])
    out = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(R, 1, H, D), None


AttentionInterface.register(ATTENTION, attend_rows)


def read(model: Any, token_ids: Tensor, cache: DynamicCache | None = None) -> tuple[Tensor, DynamicCache]:
    """Runs a forward over prompts [rows, length], or over what follows the positions in `cache`. Returns the last
    logits [rows, V] and the filled cache."""
    cache = DynamicCache() if cache is None else cache
    known = cache.get_seq_length()
    span = known + token_ids.shape[1]
    positions = torch.arange(known, span, device=model.device)
    out = model(
        input_ids=token_ids.to(model.device),
        position_ids=positions.expand(token_ids.shape),
        attention_mask=causal_mask(positions[None, None], span, model.dtype) if known else None,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return out.logits[:, -1], cache


def causal_mask(positions: Tensor, span: int, dtype: torch.dtype) -> Tensor:
    """Additive attention mask [..., span] of queries at `positions` [...]."""
    beyond = torch.arange(span, device=positions.device) > positions[..., None]
    return torch.zeros(beyond.shape, dtype=dtype, device=positions.device).masked_fill_(beyond, float("-inf"))


def _grown(cells: Tensor, rows: int, length: int) -> Tensor:
    grown = cells.new_zeros((rows, cells.shape[1], length, cells.shape[3]))
    grown[: cells.shape[0], :, : cells.shape[2]] = cells
    return grown
