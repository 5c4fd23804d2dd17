"""Causal attention among the sequences of a packed row, which may share their prompts.

Everything else in a decoder treats tokens one by one, so that it does not matter where they lie. Here each sequence is
gathered from where its tokens are into a row of its own, blocks of rows attend without any mask (so that PyTorch takes
its flash kernels, on a CPU too), and the answers go back to their places.

Shapes: L packed tokens, H query heads, K key-value heads, D head dimension; b rows of S tokens in a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from dvp_rl.contract.errors import ConfigError
from dvp_rl.engines.kv_cache import UNSUPPORTED

if TYPE_CHECKING:
    from jaxtyping import Int

PACKED = "dvp_packed"
"""Name under which `attend_packed` is registered with Transformers."""


class Rows(NamedTuple):
    blocks: tuple[Int[Tensor, "b S"], ...]
    """Where the tokens of each sequence lie. Rows are padded at the end, where no token before sees it."""
    cells: Int[Tensor, " L"]
    """For every packed token its cell in the rows of all blocks, one behind the other."""


def attend_packed(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    packed_rows: Rows,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """[1, H, L, D] queries and [1, K, L, D] keys and values to [1, L, H, D]."""
    if found := [name for name in UNSUPPORTED if kwargs.get(name) is not None]:
        raise ConfigError(f"this model's attention needs {found[0]}")
    tokens = [part[0].transpose(0, 1) for part in (query, key, value)]
    out = []
    for index in packed_rows.blocks:
        gathered = (t.index_select(0, index.flatten()).view(*index.shape, *t.shape[1:]) for t in tokens)
        q, k, v = (t.transpose(1, 2) for t in gathered)
        o = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
        out.append(o.transpose(1, 2).flatten(0, 1))
    return torch.cat(out).index_select(0, packed_rows.cells).unsqueeze(0), None


AttentionInterface.register(PACKED, attend_packed)
