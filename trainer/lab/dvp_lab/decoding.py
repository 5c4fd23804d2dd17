"""Token-by-token sampling over a KV cache, all rows in lockstep. Temperature is 1.

Shapes: N sequences, P prompt tokens, T model tokens, V tokens in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from dvp_rl.dvp.sampler import Draw, sample

from .precision import Format, RoundedCache, rounded
from .rules import Rule

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def new_cache(kv: Format | None) -> DynamicCache:
    """An empty cache whose entries are rounded to `kv`; None keeps them as they are."""
    return DynamicCache() if kv is None else RoundedCache(partial(rounded, format=kv))


def decode(
    next_logits: Callable[[Tensor], Tensor],
    prompts: Int[Tensor, "N P"],
    rule: Rule,
    uniforms: Iterable[Float[Tensor, " N"]],
) -> tuple[Draw, Float[Tensor, "N T V"]]:
    """[N, T] draws and the logits they came from; T is the number of `uniforms`.

    `next_logits` maps token ids [N, t] that follow the cached ones to the [N, V] logits of the next token.
    """
    ids, steps, logits = prompts, list[Draw](), list[Tensor]()
    for uniform in uniforms:
        z = next_logits(ids)
        steps.append(sample(z, uniform, log_min_p=rule(z), temperature=1.0))
        logits.append(z)
        ids = steps[-1].token_ids[:, None]
    return Draw(*(torch.stack(column, 1) for column in zip(*steps, strict=True))), torch.stack(logits, 1)
