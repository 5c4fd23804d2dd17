"""Causal attention among the sequences of a packed row, which may share their prompts.

The other parts of a decoder process each token by itself, wherever it lies. Here, the tokens of each sequence are
gathered into a row of their own, blocks of rows attend without a mask tensor (so that PyTorch uses its flash kernels,
on a CPU too), and the outputs return to their packed positions.

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
    """Packed positions of the tokens of each sequence. Rows are padded at the end, where no earlier token attends."""
    cells: Int[Tensor, " L"]
    """Cell of every packed token in the concatenated, flattened rows of all blocks."""


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
    """Attention of [1, H, L, D] queries to [1, K, L, D] keys and values, as [1, L, H, D].

    Raises ConfigError if the model passes an argument that changes attention itself."""
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
