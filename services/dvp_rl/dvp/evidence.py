"""The record of what trainer and engine say about the same tokens, the input of importance weights and metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from .policy import Constrained

if TYPE_CHECKING:
    from jaxtyping import Bool, Int


@dataclass(frozen=True)
class Evidence:
    """N sequences of at most T model tokens, on one device, without gradient. Entries off the mask are meaningless. The
    samples of an episode are one sequence, as the product of their tokens' probabilities is that of the episode."""

    rows: Int[Tensor, " N"]
    """Index of each sequence in the [N] vectors of its batch."""
    mask: Bool[Tensor, "N T"]
    """True on model-generated tokens."""
    train: Constrained
    """[N, T] fields, recomputed by the trainer."""
    infer: Constrained
    """[N, T] fields, as recorded by the engine at sampling; every token is inside the engine's own set."""

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, `train_logprobs` for example. `Evidence.of` is the inverse."""
        sides = {"train": self.train, "infer": self.infer}
        values = {f"{side}_{name}": value for side, own in sides.items() for name, value in own._asdict().items()}
        return {"rows": self.rows, "mask": self.mask} | values

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Evidence:
        """The record built from these tensors. Raises KeyError if one is missing."""
        train, infer = (
            Constrained(*(tensors[f"{side}_{name}"] for name in Constrained._fields)) for side in ("train", "infer")
        )
        return cls(tensors["rows"], tensors["mask"], train, infer)

    @classmethod
    def join(cls, parts: Sequence[Evidence]) -> Evidence:
        """One record in the order of `rows`, padded to the longest part. Rows without a model token are dropped."""
        T = max(part.mask.shape[1] for part in parts)
        used = torch.cat([part.mask.any(1) for part in parts])
        order = torch.cat([part.rows for part in parts])[used].argsort()
        tensors = [part.tensors() for part in parts]

        def whole(values: Sequence[Tensor]) -> Tensor:
            return torch.cat([v if v.dim() == 1 else pad(v, (0, T - v.shape[1])) for v in values])[used][order]

        return cls.of({name: whole([own[name] for own in tensors]) for name in tensors[0]})
